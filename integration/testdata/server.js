// A server for the tests: files of the directory that is its argument, and uploads
// answered with their length and hash. It prints its address.
const { createHash } = require("node:crypto");
const { createReadStream, existsSync, statSync } = require("node:fs");
const { createServer } = require("node:http");
const { join } = require("node:path");

const root = process.argv[2];

function upload(request, response) {
  const hash = createHash("sha256");
  let length = 0;
  request.on("data", (part) => {
    hash.update(part);
    length += part.length;
  });
  request.on("end", () => response.end(`${length} ${hash.digest("hex")}\n`));
}

function file(request, response) {
  const path = join(root, new URL(request.url, "http://x").pathname);
  if (!existsSync(path) || !statSync(path).isFile()) {
    response.writeHead(404).end("not found\n");
    return;
  }
  response.setHeader("Content-Length", statSync(path).size);
  if (request.method === "HEAD") {
    response.end();
    return;
  }
  createReadStream(path).pipe(response);
}

const server = createServer((request, response) => {
  if (request.url === "/echo") {
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify(request.headers));
    return;
  }
  (request.method === "GET" || request.method === "HEAD" ? file : upload)(request, response);
});
server.listen(0, "127.0.0.1", () => console.log(`address 127.0.0.1:${server.address().port}`));
