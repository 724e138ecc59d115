package lb

// Health is what a pool holds of a backend. It decides who is a candidate:
//
//	health   candidate?                          becomes          when
//	unknown  yes                                 ejected          failures in a row, see PassiveHealth
//	ejected  no                                  trial            its time is up
//	trial    for one request at a time           unknown          that request, or a later one, was answered
//	                                             ejected, longer  that request, or a later one, failed
//
// The last usable backend is never ejected. Should none be usable all the same,
// because the operator took the others out, the pool fails open: every backend
// that is neither draining nor disabled is a candidate, whatever its health.
type Health uint8

// The kinds of health.
const (
	// HealthUnknown is a backend that nothing speaks against. It is usable.
	HealthUnknown Health = iota
	// HealthEjected is a backend that was taken out because it failed.
	HealthEjected
	// HealthTrial is a backend whose ejection is over and that has yet to show
	// that it works again.
	HealthTrial
)

var healthNames = [...]string{"unknown", "ejected", "trial"}

// String returns the health as one lower-case word.
func (h Health) String() string { return nameIn(healthNames[:], int(h)) }

// MarshalText makes it the word of String in JSON and in logs.
func (h Health) MarshalText() ([]byte, error) { return []byte(h.String()), nil }
