package h1

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"slices"
)

// readerSize is that of the buffers that answers are read through.
const readerSize = 4 << 10

// checkHead waits for the whole of the next head and checks what net/http does not mind
// but others might read in another way. It returns the reader to go on with: a head that
// does not fit br's buffer gets a larger one.
func (c *conn) checkHead(br *bufio.Reader) (*bufio.Reader, error) {
	var s headScan
	for {
		buf, _ := br.Peek(br.Buffered()) // never fails
		if done, err := s.scan(buf); done || err != nil {
			return br, err
		}
		if len(buf) == br.Size() {
			buf = slices.Clone(buf)
			br = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(buf), c), 4*br.Size())
		}
		if _, err := br.Peek(len(buf) + 1); err != nil {
			if err == io.EOF && len(buf) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return br, err
		}
	}
}

// headScan goes through a head line by line.
type headScan struct {
	at     int // where the next line begins
	lines  int
	length bool // there was a Content-Length
	coding bool // there was a Transfer-Encoding
	old    bool // it is HTTP/1.0
}

// scan looks at the lines of buf that are complete, and tells whether the head is.
func (s *headScan) scan(buf []byte) (done bool, err error) {
	for {
		n := bytes.IndexByte(buf[s.at:], '\n')
		if n < 0 {
			return false, nil
		}
		line := buf[s.at : s.at+n]
		s.at += n + 1
		if n == 0 || line[n-1] != '\r' {
			return false, fmt.Errorf("%w: a line of its head ends without a carriage return", ErrAnswer)
		}
		line = line[:n-1]
		s.lines++
		switch {
		case s.lines == 1:
			err = s.status(line)
		case len(line) == 0:
			return true, nil
		default:
			err = s.field(line)
		}
		if err != nil {
			return false, err
		}
	}
}

// status checks a status line: HTTP/1.1 200 OK.
func (s *headScan) status(line []byte) error {
	const form = "HTTP/1.x 000"
	ok := len(line) >= len(form) && (len(line) == len(form) || line[len(form)] == ' ')
	for i := 0; ok && i < len(form); i++ {
		switch form[i] {
		case 'x':
			ok = line[i] == '0' || line[i] == '1'
		case '0':
			ok = '0' <= line[i] && line[i] <= '9'
		default:
			ok = line[i] == form[i]
		}
	}
	if !ok || line[len("HTTP/1.x ")] == '0' || !clean(line) {
		return fmt.Errorf("%w: its status line is %q", ErrAnswer, short(line))
	}
	s.old = line[len("HTTP/1.")] == '0'
	return nil
}

// field checks one line of the header.
func (s *headScan) field(line []byte) error {
	colon := bytes.IndexByte(line, ':')
	// A name that is no token is one that the field has for nobody: it can stay. But what
	// stands between a name and the colon, or before it, is passed over by some.
	if colon <= 0 || blank(line[0]) || blank(line[colon-1]) || !clean(line) {
		return fmt.Errorf("%w: its header has the line %q", ErrAnswer, short(line))
	}
	switch name := line[:colon]; {
	case len(name) == len("Content-Length") && bytes.EqualFold(name, []byte("Content-Length")):
		if s.length || s.coding {
			return fmt.Errorf("%w: it says twice how long it is", ErrAnswer)
		}
		s.length = true
	case len(name) == len("Transfer-Encoding") && bytes.EqualFold(name, []byte("Transfer-Encoding")):
		if s.length || s.coding {
			return fmt.Errorf("%w: it says twice how long it is", ErrAnswer)
		}
		if s.old {
			return fmt.Errorf("%w: HTTP/1.0 has no Transfer-Encoding", ErrAnswer)
		}
		s.coding = true
	}
	return nil
}

func blank(b byte) bool { return b == ' ' || b == '\t' }

// clean tells whether line holds no control character but the tab.
func clean(line []byte) bool {
	for _, b := range line {
		if b < ' ' && b != '\t' || b == 0x7f {
			return false
		}
	}
	return true
}

// short is as much of line as an error should show.
func short(line []byte) []byte { return line[:min(len(line), 80)] }
