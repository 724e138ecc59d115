// A server for the tests of smuggling: it answers each request with its method and
// target, and writes what it has read as a line of JSON. With the argument "lenient" its
// parser forgives what it can.
const { createServer } = require("node:http");

const log = (line) => console.log(JSON.stringify(line));

const server = createServer({ insecureHTTPParser: process.argv[2] === "lenient" }, (request, response) => {
  const parts = [];
  const { headers } = request;
  const seen = (whole) =>
    log({
      line: `${request.method} ${request.url} HTTP/${request.httpVersion}`,
      length: headers["content-length"],
      coding: headers["transfer-encoding"],
      way: headers["x-forwarded-for"],
      body: Buffer.concat(parts).toString(),
      whole,
    });
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    seen(true);
    response.end(`${request.method} ${request.url}\n`);
  });
  request.on("close", () => request.complete || seen(false));
  request.on("error", () => {}); // that it breaks off
});
server.on("clientError", (error, socket) => {
  if (error.rawPacket) {
    log({ line: error.rawPacket.toString().split("\r\n")[0], fault: error.code, whole: false });
  }
  socket.end("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
});
server.keepAliveTimeout = 0;
server.listen(0, "127.0.0.1", () => console.log(`address 127.0.0.1:${server.address().port}`));
