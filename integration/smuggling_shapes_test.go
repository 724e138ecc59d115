package integration

import (
	"fmt"
	"strings"
)

// The shapes of TestNoRequestIsSmuggled.

// framings are in doubt about where the request ends.
func framings() (shapes []shape) {
	for _, row := range []struct{ name, rest, want, framed string }{
		// One length and one coding: net/http's server goes by the coding, as RFC 9112,
		// section 6.3, allows, and has taken the length away.
		{"CL.TE: the coding counts, behind it is the client's own next request", length("0\r\n\r\n"+second) + chunked + "\r\n0\r\n\r\n" + second, "first second next", "chunked"},
		{"TE.CL: the coding counts, not the length that ends within a chunk", chunked + "Content-Length: 4\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"TE.CL: the coding counts, not the length 0", "Content-Length: 0\r\n" + chunked + "\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked and two lengths", chunked + "Content-Length: 5\r\nContent-Length: 0\r\n\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunked and a length that is none", chunked + "Content-Length: x\r\n\r\n0\r\n\r\n" + smuggled, "400", ""},

		{"coding xchunked", "Transfer-Encoding: xchunked\r\n" + length(smuggled) + "\r\n" + smuggled, "501", ""},
		{"coding chunked, identity", "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding identity, chunked", "Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding identity", "Transfer-Encoding: identity\r\n" + length(smuggled) + "\r\n" + smuggled, "501", ""},
		{"coding gzip, chunked", "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding chunked with a parameter", "Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding chunked and a comma", "Transfer-Encoding: chunked,\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding chunked in quotes", "Transfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding that is empty", "Transfer-Encoding:\r\n" + length(smuggled) + "\r\n" + smuggled, "501", ""},
		{"coding with a letter that is k to Unicode", "Transfer-Encoding: chun\u212aed\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding with a vertical tab", "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"coding with a NUL", "Transfer-Encoding: chunked\x00\r\n\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"coding with a no-break space", "Transfer-Encoding:\xa0chunked\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding with a CR in front", "Transfer-Encoding: \rchunked\r\n\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"space before the colon of a coding", "Transfer-Encoding : chunked\r\n" + length(smuggled) + "\r\n" + smuggled, "400", ""},
		{"tab before the colon of a coding", "Transfer-Encoding\t: chunked\r\n" + length(smuggled) + "\r\n" + smuggled, "400", ""},
		{"chunked on two lines", chunked + chunked + "\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"chunked and identity on two lines", chunked + "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"chunked and nonsense on two lines", chunked + "Transfer-encoding: cow\r\n\r\n0\r\n\r\n" + smuggled, "501", ""},
		{"coding behind a bare CR", "X: y\rTransfer-Encoding: chunked\r\n" + length(smuggled) + "\r\n" + smuggled, "400", ""},
		{"chunked behind two spaces", "Transfer-Encoding:  chunked\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked behind a tab", "Transfer-Encoding:\tchunked\t\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked in capitals", "TRANSFER-ENCODING: CHUNKED\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked on a folded line", "Transfer-Encoding:\r\n chunked\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked on a folded line with a length", "Transfer-Encoding:\r\n\tchunked\r\nContent-Length: 4\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},
		{"chunked behind a bare LF", "Content-Length: 4\nTransfer-Encoding: chunked\r\n\r\n" + chunk(smuggled) + "0\r\n\r\n", "first next", "chunked " + smuggled},

		{"two lengths that differ, the second longer", "Content-Length: 0\r\n" + length(smuggled) + "\r\n" + smuggled, "400", ""},
		{"two lengths that differ, the first longer", length(smuggled) + "Content-Length: 0\r\n\r\n" + smuggled, "400", ""},
		{"two lengths that are equal", "Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello", "first next", "5 hello"},
		{"list of equal lengths", "Content-Length: 5, 5\r\n\r\nhello" + smuggled, "400", ""},
		{"length +5", "Content-Length: +5\r\n\r\nhello" + smuggled, "400", ""},
		{"length -1", "Content-Length: -1\r\n\r\nhello" + smuggled, "400", ""},
		{"length -0", "Content-Length: -0\r\n\r\nhello" + smuggled, "400", ""},
		{"length 0x5", "Content-Length: 0x5\r\n\r\nhello" + smuggled, "400", ""},
		{"length 5e0", "Content-Length: 5e0\r\n\r\nhello" + smuggled, "400", ""},
		{"length 5.0", "Content-Length: 5.0\r\n\r\nhello" + smuggled, "400", ""},
		{"length 0_5", "Content-Length: 0_5\r\n\r\nhello" + smuggled, "400", ""},
		{"length 5;q=1", "Content-Length: 5;q=1\r\n\r\nhello" + smuggled, "400", ""},
		{"length 5 3", "Content-Length: 5 3\r\n\r\nhello" + smuggled, "400", ""},
		{"length in quotes", "Content-Length: \"5\"\r\n\r\nhello" + smuggled, "400", ""},
		{"length in digits that are not ASCII", "Content-Length: \u0665\r\n\r\nhello" + smuggled, "400", ""},
		{"length that is empty", "Content-Length:\r\n\r\nhello" + smuggled, "400", ""},
		{"length over 64 bits", "Content-Length: 18446744073709551621\r\n\r\nhello" + smuggled, "400", ""},
		{"length over 63 bits", "Content-Length: 9223372036854775808\r\n\r\nhello" + smuggled, "400", ""},
		{"length on a folded line", "Content-Length:\r\n 5\r\n\r\nhello", "first next", "5 hello"},
		{"length folded in the middle", "Content-Length: 5\r\n 0\r\n\r\nhello" + smuggled, "400", ""},
		{"length with zeros in front", "Content-Length: 0000000000000000000005\r\n\r\nhello", "first next", "5 hello"},
		{"length behind a tab", "Content-Length:\t5 \r\n\r\nhello", "first next", "5 hello"},
		{"space before the colon of a length", "Content-Length : 5\r\n\r\nhello" + smuggled, "400", ""},
		{"length behind a bare LF", "X: y\nContent-Length: 5\n\nhello", "first next", "5 hello"},
		{"look-alikes of framing fields frame nothing", "Content_Length: 5\r\nTransfer_Encoding: chunked\r\nContentLength: 5\r\n\r\n", "first next", "0"},
		{"body that is a request", length(smuggled) + "\r\n" + smuggled, "first next", fmt.Sprint(len(smuggled)) + " " + smuggled},
	} {
		s := shape{name: row.name, sent: post(row.rest), want: row.want, framed: row.framed}
		switch {
		case strings.HasPrefix(row.name, "look-alikes"):
			s.fields = "Content_length: 5 | Contentlength: 5 | Transfer_encoding: chunked"
		case strings.Contains(row.name, "length behind a bare LF"):
			s.fields = "X: y"
		}
		shapes = append(shapes, s)
	}
	return shapes
}

func post(rest string) string { return "POST /NNN/first HTTP/1.1\r\nHost: front.test\r\n" + rest }

// chunkings are bodies in chunks.
func chunkings() (shapes []shape) {
	long := strings.Repeat("0", 5000)
	for _, row := range []struct{ name, rest, want, framed string }{
		{"chunk extensions", "5;a=b;c=\"d\"\r\nhello\r\n0;e\r\n\r\n", "first next", "chunked hello"},
		{"chunk extension that looks like a chunk", "5;\t2 \r\nhello\r\n0\r\n\r\n", "first next", "chunked hello"},
		{"chunk size with zeros in front", "0000000000000005\r\nhello\r\n00\r\n\r\n", "first next", "chunked hello"},
		{"chunk size in capitals", "A\r\nhellohello\r\n0\r\n\r\n", "first next", "chunked hellohello"},
		{"space behind a chunk size", "5 \t\r\nhello\r\n0 \r\n\r\n", "first next", "chunked hello"},
		{"chunk size with more zeros than 64 bits have digits", "00000000000000005\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with 0x", "0x5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with a plus sign", "+5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size that is negative", "-5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with a space in front", " 5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with a space in it", "5 5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with an underscore", "0_5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size that is empty", "\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size that is an extension alone", ";a\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size over 64 bits", "10000000000000005\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with a NUL", "5\x00\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size with a form feed", "5\f\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk size of 5000 digits", long + "5\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk extension of 5000 bytes", "5;" + long + "\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"chunk extensions that outweigh the data", strings.Repeat("1;"+long[:1000]+"\r\nx\r\n", 40) + "0\r\n\r\n" + smuggled, "400", ""},
		{"LF behind a chunk size", "5\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"LF behind a chunk extension", "5;a\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"LF in a chunk extension", "5;\n0\r\n\r\n" + smuggled, "400", ""},
		{"CR behind a chunk size", "5\rhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"CR in a chunk extension", "5;a\rb\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"two CRs behind a chunk size", "5\r\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"LF behind a chunk", "5\r\nhello\n0\r\n\r\n" + smuggled, "400", ""},
		{"CR behind a chunk", "5\r\nhello\r0\r\n\r\n" + smuggled, "400", ""},
		{"nothing behind a chunk", "5\r\nhello0\r\n\r\n" + smuggled, "400", ""},
		{"two bytes behind a chunk that are no end", "5\r\nhelloXX0\r\n\r\n" + smuggled, "400", ""},
		{"chunk longer than it says", "3\r\nhello\r\n0\r\n\r\n" + smuggled, "400", ""},
		{"LF behind the last chunk", "5\r\nhello\r\n0\n\r\n" + smuggled, "400", ""},
		{"CR behind the last chunk", "5\r\nhello\r\n0\r" + smuggled, "400", ""},
		{"trailer that is no field", "5\r\nhello\r\n0\r\nno field\r\n\r\n" + smuggled, "400", ""},
		{"trailer with a NUL", "5\r\nhello\r\n0\r\nX: y\x00\r\n\r\n" + smuggled, "400", ""},
		{"trailers that frame and route", "5\r\nhello\r\n0\r\n" + length(smuggled) + "Host: evil.test\r\nTransfer-Encoding: chunked\r\nConnection: close\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n", "first next", "chunked hello"},
		{"chunk that has the end of the body in it", chunk("0\r\n\r\n"+smuggled) + "0\r\n\r\n", "first next", "chunked 0\r\n\r\n" + smuggled},
	} {
		shapes = append(shapes, shape{name: row.name, sent: post(chunked + "\r\n" + row.rest), want: row.want, framed: row.framed})
	}
	for _, name := range []string{"Content-Length", "Transfer-Encoding", "Trailer"} {
		shapes = append(shapes, shape{name: name + " announced as a trailer", sent: post(chunked + "Trailer: " + name + "\r\n\r\n" + hello + smuggled), want: "400"})
	}
	return append(shapes,
		shape{name: "Host announced as a trailer", sent: post(chunked + "Trailer: Host, X-Forwarded-For\r\n\r\n5\r\nhello\r\n0\r\nHost: evil.test\r\n\r\n"), want: "first next", framed: "chunked hello"},
		shape{name: "chunks that do not end", sent: post(chunked + "\r\n5\r\nhello\r\nffff\r\n" + smuggled), want: "499", half: true},
		shape{name: "chunk of 64 bits", sent: post(chunked + "\r\nffffffffffffffff\r\nhello\r\n0\r\n\r\n" + smuggled), want: "499", half: true},
		shape{name: "length longer than what comes", sent: post("Content-Length: 9223372036854775807\r\n\r\nhello" + smuggled), want: "499", half: true},
	)
}

// heads are fields, Host among them.
func heads() (shapes []shape) {
	for _, row := range []struct{ name, rest, want, fields string }{
		{"LF at the end of lines", "X: y\nZ: z\r\n\r\n", "first next", "X: y | Z: z"},
		{"LF for the empty line", "X: y\r\n\n", "first next", "X: y"},
		{"NUL in a value", "X: y\x00z\r\n\r\n" + smuggled, "400", ""},
		{"CR in a value", "X: y\rz: a\r\n\r\n" + smuggled, "400", ""},
		{"two CRs at the end of a line", "X: y\r\r\n\r\n" + smuggled, "400", ""},
		{"CR alone for the empty line", "X: y\r\n\r" + smuggled, "400", ""},
		{"escape in a value", "X: \x1b[2J\r\n\r\n" + smuggled, "400", ""},
		{"DEL in a value", "X: \x7f\r\n\r\n" + smuggled, "400", ""},
		{"bytes that are not ASCII in a value", "X: \xff\u00fc\r\n\r\n", "first next", "X: \xff\u00fc"},
		{"NUL in a name", "X\x00: y\r\n\r\n" + smuggled, "400", ""},
		{"space before the colon", "X : y\r\n\r\n" + smuggled, "400", ""},
		{"space in a name", "X Y: z\r\n\r\n" + smuggled, "400", ""},
		{"name that is empty", ": y\r\n\r\n" + smuggled, "400", ""},
		{"name that is not ASCII", "X\u00fc: y\r\n\r\n" + smuggled, "400", ""},
		{"name in parentheses", "(X): y\r\n\r\n" + smuggled, "400", ""},
		{"no colon", "X\r\n\r\n" + smuggled, "400", ""},
		{"request line for a field", "GET /NNN/smuggled HTTP/1.1\r\n\r\n", "400", ""},
		{"pseudo field", ":authority: evil.test\r\n\r\n" + smuggled, "400", ""},
		{"folded value", "X: y\r\n z\r\n\tz\r\n\r\n", "first next", "X: y z z"},
		{"folded value that looks like a coding", "X: y\r\n Transfer-Encoding: chunked\r\n\r\n", "first next", "X: y Transfer-Encoding: chunked"},
		{"folded value that looks like the end", "X: y\r\n \r\n\r\n", "first next", "X: y"},
		{"Host on two lines", "Host: evil.test\r\n\r\n" + smuggled, "400", ""},
		{"the same Host on two lines", "Host: front.test\r\n\r\n" + smuggled, "400", ""},
		{"Host that is folded", " evil.test\r\n\r\n" + smuggled, "400", ""},
		{"header over 1 MiB", "X: " + strings.Repeat("x", 1<<20+8<<10) + "\r\n\r\n" + smuggled, "431", ""},

		// What the pool says about the client's way cannot be said by the client, nor
		// unsaid.
		{"Connection that names what frames and routes", "Connection: Content-Length, Host, Transfer-Encoding, X-Forwarded-For, X-Forwarded-Host, Authorization, Te, X, keep-alive\r\n" +
			"Authorization: Basic x\r\nTE: trailers\r\nX: y\r\nZ: z\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n", "first next", "Te: trailers | Z: z"},
		{"look-alikes of forwarded fields", "X_Forwarded_For: 6.6.6.6\r\nX-Forwarded_For: 6.6.6.6\r\nx_forwarded_host: evil.test\r\nX_Real_IP: 6.6.6.6\r\n\r\n", "first next", ""},
		{"forwarded fields", "X-Forwarded-For: 6.6.6.6\r\nX-Forwarded-Host: evil.test\r\nX-Forwarded-Proto: https\r\nForwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\n\r\n", "first next", ""},
		{"fields for one connection", "Keep-Alive: timeout=1\r\nProxy-Connection: close\r\nProxy-Authorization: x\r\nTE: chunked\r\nUpgrade: x\r\nTrailer: X\r\n\r\n", "first next", ""},
		{"Expect that nobody knows", "Expect: 200-maybe\r\n\r\n" + smuggled, "417", ""},
		{"Expect with 100-continue in it, which net/http takes for that", "Expect: x 100-continue\r\n\r\n", "first next", "Expect: x 100-continue"},
		{"Expect with more than one", "Expect: 100-continue, 200-maybe\r\n\r\n", "first next", "Expect: 100-continue, 200-maybe"},
		{"Expect without a body", "Expect: 100-continue\r\n\r\n", "first next", "Expect: 100-continue"},
	} {
		shapes = append(shapes, shape{name: row.name, sent: post(row.rest), want: row.want, framed: "0", fields: row.fields})
	}
	return append(shapes,
		shape{name: "Expect with a body that is there already", sent: post("Expect: 100-CONTINUE\r\n" + length(smuggled) + "\r\n" + smuggled), want: "100 first next", framed: fmt.Sprint(len(smuggled), " ", smuggled), fields: "Expect: 100-CONTINUE"},
		shape{name: "Expect on two lines", sent: post("Expect: 100-continue\r\nExpect: x\r\n\r\n"), want: "first next", framed: "0", fields: "Expect: 100-continue | Expect: x", refused: "nginx 400"},
		shape{name: "length named in Connection", sent: post("Connection: Content-Length\r\n" + length(smuggled) + "\r\n" + smuggled), want: "first next", framed: fmt.Sprint(len(smuggled), " ", smuggled)},
		shape{name: "coding named in Connection", sent: post("Connection: Transfer-Encoding\r\n" + chunked + "\r\n" + chunk(smuggled) + "0\r\n\r\n"), want: "first next", framed: "chunked " + smuggled},
		shape{name: "field in front of Host that begins with a space", sent: "GET /NNN/first HTTP/1.1\r\n X: y\r\nHost: front.test\r\n\r\n" + smuggled, want: "400"},
		shape{name: "no Host", sent: "GET /NNN/first HTTP/1.1\r\n\r\n" + smuggled, want: "400"},
		shape{name: "Host that is empty", sent: "GET /NNN/first HTTP/1.1\r\nHost:\r\n\r\n", want: "first next", fields: "Host: BACKEND"},
		shape{name: "Host with user information", sent: "GET /NNN/first HTTP/1.1\r\nHost: front.test@evil.test\r\n\r\n" + smuggled, want: "400"},
		shape{name: "Host with a space", sent: "GET /NNN/first HTTP/1.1\r\nHost: front.test evil.test\r\n\r\n" + smuggled, want: "400"},
		shape{name: "Host that is not ASCII", sent: "GET /NNN/first HTTP/1.1\r\nHost: fr\u00f6nt.test\r\n\r\n" + smuggled, want: "400"},
		shape{name: "Host with a path", sent: "GET /NNN/first HTTP/1.1\r\nHost: front.test/x\r\n\r\n" + smuggled, want: "400"},
		shape{name: "Host with a comma", sent: "GET /NNN/first HTTP/1.1\r\nHost: front.test, evil.test\r\n\r\n" + smuggled, want: "400"},
	)
}

// targets are request targets; each arrives as it was sent, if it arrives.
func targets() (shapes []shape) {
	for _, row := range []struct{ name, target, want, refused string }{
		{"CR and LF that are escaped", "/NNN/first%0d%0aX:%20y%0d%0a%0d%0aGET%20/NNN/smuggled", "first next", ""},
		{"NUL that is escaped", "/NNN/first%00", "first next", "nginx 400"},
		{"NUL", "/NNN/first\x00", "400", ""},
		{"CR", "/NNN/first\rX", "400", ""},
		{"tab", "/NNN/first\tX", "400", ""},
		{"escape", "/NNN/first\x1b", "400", ""},
		{"DEL", "/NNN/first\x7f", "400", ""},
		{"space", "/NNN/first HTTP/1.1 /NNN/smuggled", "400", ""},
		{"escape that is none", "/NNN/first%zz", "400", ""},
		{"bytes that are not ASCII", "/NNN/first/\u00fc\xff", "first next", "node 400"},
		{"two slashes", "//NNN/first", "first next", ""},
		{"two dots", "/x/../NNN/first", "first next", ""},
		{"more dots than there are directories", "/x/../../NNN/first", "first next", "nginx 400"},
		{"dots that are escaped", "/x/%2e%2e/%2E/NNN/first", "first next", ""},
		{"slash that is escaped", "/x%2F..%2fNNN/first", "first next", ""},
		{"backslash", `/x\..\NNN/first`, "first next", ""},
		{"no slash", "NNN/first", "400", ""},
		{"nothing", "", "400", ""},
		{"query with semicolons and what is not ASCII", "/NNN/first?a;b=\u00fc&%zz", "first next", "node 400"},
		{"fragment", "/NNN/first#x", "first next", ""},
		{"absolute form with a bad port", "http://evil.test:x/NNN/first", "400", ""},
		{"absolute form with a space in its host", "http://evil.test%20x/NNN/first", "400", ""},
	} {
		s := shape{name: "target: " + row.name, sent: "GET " + row.target + " HTTP/1.1\r\nHost: front.test\r\n\r\n", want: row.want, refused: row.refused}
		if row.want == "400" {
			s.sent += smuggled
		}
		shapes = append(shapes, s)
	}
	// The authority of the absolute form is the Host, whatever the field says.
	return append(shapes,
		shape{name: "target: absolute form of another host", sent: "GET http://evil.test/NNN/first HTTP/1.1\r\nHost: front.test\r\n\r\n", want: "first next",
			line: "GET /NNN/first HTTP/1.1", fields: "Host: evil.test | X-Forwarded-Host: evil.test"},
		shape{name: "target: absolute form of another port and scheme", sent: "GET https://u:p@evil.test:1//NNN/first?q HTTP/1.1\r\nHost: front.test\r\n\r\n", want: "first next",
			line: "GET //NNN/first?q HTTP/1.1", fields: "Host: evil.test:1 | X-Forwarded-Host: evil.test:1"},
	)
}

// methods are methods and versions.
func methods() []shape {
	h := "Host: front.test\r\n\r\n"
	return []shape{
		{name: "method in lower case", sent: "get /NNN/first HTTP/1.1\r\n" + h, want: "first next", refused: "nginx 400, node 400"},
		{name: "method that nobody knows", sent: "BREW /NNN/first HTTP/1.1\r\n" + h, want: "first next", refused: "node 400"},
		{name: "method that is a token of signs", sent: "!#$%&'*+.^_`|~ /NNN/first HTTP/1.1\r\n" + h, want: "first next", refused: "nginx 400, node 400"},
		{name: "method that is no token", sent: "G(T /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "method with a CR", sent: "\rGET /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "method with a NUL", sent: "GET\x00 /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "method behind a space", sent: " GET /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "two spaces behind the method", sent: "GET  /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "tab behind the method", sent: "GET\t/NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "LF behind the request line", sent: "GET /NNN/first HTTP/1.1\n" + h, want: "first next", line: "GET /NNN/first HTTP/1.1"},
		{name: "CR behind the request line", sent: "GET /NNN/first HTTP/1.1\r" + h + smuggled, want: "400"},
		{name: "empty line in front of the request line", sent: "\r\nGET /NNN/first HTTP/1.1\r\n" + h + smuggled, want: "400"},
		{name: "space behind the version", sent: "GET /NNN/first HTTP/1.1 \r\n" + h + smuggled, want: "400"},
		{name: "no version", sent: "GET /NNN/first\r\n" + h + smuggled, want: "400"},
		{name: "HTTP/0.9", sent: "GET /NNN/first HTTP/0.9\r\n" + h + smuggled, want: "505"},
		{name: "HTTP/1.2", sent: "GET /NNN/first HTTP/1.2\r\n" + h, want: "first next", line: "GET /NNN/first HTTP/1.1"},
		{name: "HTTP/1.10", sent: "GET /NNN/first HTTP/1.10\r\n" + h + smuggled, want: "400"},
		{name: "HTTP/2.0", sent: "GET /NNN/first HTTP/2.0\r\n" + h + smuggled, want: "505"},
		{name: "http/1.1", sent: "GET /NNN/first http/1.1\r\n" + h + smuggled, want: "400"},
		{name: "CONNECT", sent: "CONNECT evil.test:443 HTTP/1.1\r\n" + h, want: "405 next"},
		{name: "CONNECT of a path", sent: "CONNECT /NNN/first HTTP/1.1\r\n" + h, want: "405 next"},
		{name: "CONNECT with a body", sent: "CONNECT evil.test:443 HTTP/1.1\r\n" + length(smuggled) + h + smuggled, want: "405 next"},
		{name: "OPTIONS of all", sent: "OPTIONS * HTTP/1.1\r\n" + length(smuggled) + h + smuggled, want: "200 next"},
		{name: "preface of HTTP/2", sent: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + smuggled, want: "400"},
		{name: "preface of HTTP/2 that is one of HTTP/1.1", sent: "PRI /NNN/first HTTP/1.1\r\n" + h, want: "first next", refused: "node 400"},

		// HTTP/1.0 knows no codings: net/http's server takes the field away, and what
		// follows the head is no request.
		{name: "chunks of HTTP/1.0", sent: "POST /NNN/first HTTP/1.0\r\nConnection: keep-alive\r\n" + chunked + h + hello + smuggled, want: "first 400", framed: "0", line: "POST /NNN/first HTTP/1.1"},
		{name: "chunks and a length of HTTP/1.0", sent: "POST /NNN/first HTTP/1.0\r\nConnection: keep-alive\r\n" + chunked + length(hello) + h + hello, want: "first next", framed: "15 " + hello, line: "POST /NNN/first HTTP/1.1"},
		{name: "HTTP/1.0 without keep-alive", sent: "GET /NNN/first HTTP/1.0\r\n" + h + smuggled, want: "first", line: "GET /NNN/first HTTP/1.1"},
	}
}

// sequences are requests one behind the other.
func sequences() []shape {
	var twenty, roles strings.Builder
	for i := range 20 {
		fmt.Fprintf(&twenty, "GET /NNN/r%d HTTP/1.1\r\nHost: front.test\r\n\r\n", i)
		fmt.Fprintf(&roles, "r%d ", i)
	}
	h := "Host: front.test\r\n"
	body := length(smuggled) + "\r\n" + smuggled
	framed := fmt.Sprint(len(smuggled), " ", smuggled)
	return []shape{
		{name: "two requests", sent: "GET /NNN/first HTTP/1.1\r\n" + h + "\r\n" + second, want: "first second next"},
		{name: "20 requests", sent: twenty.String(), want: roles.String() + "next"},
		{name: "POST and 20 requests", sent: post(body) + twenty.String(), want: "first " + roles.String() + "next", framed: framed},
		{name: "empty lines behind a POST", sent: post("Content-Length: 5\r\n\r\nhello\r\n\r\n"), want: "first next", framed: "5 hello"},
		{name: "more empty lines behind a POST than are forgiven", sent: post("Content-Length: 5\r\n\r\nhello\r\n\r\n\r\n" + smuggled), want: "first 400", framed: "5 hello"},
		{name: "bytes behind a body", sent: post("Content-Length: 5\r\n\r\nhelloX: " + smuggled), want: "first 400", framed: "5 hello"},
		{name: "request behind Connection: close", sent: post("Connection: close\r\nContent-Length: 5\r\n\r\nhello" + smuggled), want: "first", framed: "5 hello"},
		{name: "GET with a body", sent: "GET /NNN/first HTTP/1.1\r\n" + h + body, want: "first next", framed: framed},
		{name: "GET with chunks", sent: "GET /NNN/first HTTP/1.1\r\n" + h + chunked + "\r\n" + chunk(smuggled) + "0\r\n\r\n", want: "first next", framed: "chunked " + smuggled},
		{name: "DELETE with a body", sent: "DELETE /NNN/first HTTP/1.1\r\n" + h + body, want: "first next", framed: framed},
		{name: "OPTIONS with a body", sent: "OPTIONS /NNN/first HTTP/1.1\r\n" + h + body, want: "first next", framed: framed},
		{name: "HEAD with a body", sent: "HEAD /NNN/first HTTP/1.1\r\n" + h + body, want: "first next", framed: framed},
		{name: "TRACE with a body", sent: "TRACE /NNN/first HTTP/1.1\r\n" + h + body, want: "first next", framed: framed, refused: "nginx 405"},
	}
}

// upgrades ask to switch, of backends that do not.
func upgrades() (shapes []shape) {
	const key, version = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", "Sec-WebSocket-Version: 13\r\n"
	const asks, asked = "Connection: Upgrade\r\nUpgrade: websocket\r\n", "Connection: Upgrade | Sec-Websocket-Key: dGhlIHNhbXBsZSBub25jZQ== | Sec-Websocket-Version: 13 | Upgrade: websocket"
	for _, row := range []struct{ name, rest, want, fields string }{
		{"handshake", asks + key + version + "\r\n", "first next", asked},
		{"handshake of the wrong version", asks + key + "Sec-WebSocket-Version: 777\r\n\r\n", "first next", strings.Replace(asked, "13", "777", 1)},
		{"handshake without a key", asks + version + "\r\n", "first next", strings.Replace(asked, "Sec-Websocket-Key: dGhlIHNhbXBsZSBub25jZQ== | ", "", 1)},
		{"handshake with a frame behind it", asks + key + version + "\r\n\x81\x85\x00\x00\x00\x00hello" + smuggled, "first 400", asked},
		{"two protocols", "Connection: Upgrade\r\nUpgrade: websocket, h2c\r\n" + key + version + "\r\n", "first next", asked},
		{"h2c", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", "first next", ""},
		{"h2c in capitals, on two lines", "Connection: HTTP2-Settings\r\nConnection: upgrade\r\nUpgrade: x\r\nUpgrade: H2C\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", "first next", ""},
		{"h2c with the preface behind it", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\nPRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00" + smuggled, "first 400", ""},
		{"TLS", "Connection: Upgrade\r\nUpgrade: TLS/1.2\r\n\r\n\x16\x03\x01\x00\x05hello" + smuggled, "first 400", ""},
	} {
		shapes = append(shapes, shape{name: "upgrade: " + row.name, sent: "GET /NNN/first HTTP/1.1\r\nHost: front.test\r\n" + row.rest, want: row.want, fields: row.fields})
	}
	return append(shapes,
		shape{name: "upgrade: handshake with a body", sent: post(asks + key + version + length(smuggled) + "\r\n" + smuggled), want: "first next", framed: fmt.Sprint(len(smuggled), " ", smuggled), fields: asked},
		shape{name: "upgrade: handshake with chunks", sent: post(asks + key + version + chunked + "\r\n" + chunk(smuggled) + "0\r\n\r\n"), want: "first next", framed: "chunked " + smuggled, fields: asked},
	)
}
