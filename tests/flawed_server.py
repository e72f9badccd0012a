"""An HTTP server on loopback that fails, stalls, truncates and lies when it is told to."""

import http.server
import re
import socket
import threading
import time


class Flawed(http.server.ThreadingHTTPServer):
    """Serves a folder on loopback; `flaw(path, number of the request)` says what goes wrong with a request."""

    daemon_threads = True

    def __init__(self, root, flaw=lambda path, number: ""):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.flaw, self.requests, self.ranges = root, flaw, 0, True
        self.asked = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # broken connections are what these tests are about


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.requests += 1
        server.asked.append(f"{self.path} {self.headers.get('Range', '')}")
        flaw = server.flaw(self.path, server.requests)
        path = server.root / self.path.lstrip("/")
        if flaw.isdigit() or not path.exists():
            self.send_error(int(flaw or 404))
            return
        data = path.read_bytes()
        found = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
        low, high = (int(found[1]), int(found[2] or len(data)) + 1) if found else (0, len(data))
        if low >= len(data):
            self.send_error(416)
            return
        body = data[low:high]
        if flaw == "garble":
            body = bytes(len(body))
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if flaw == "stall":
            time.sleep(2)
            return
        self.wfile.write(body[: len(body) // 2] if flaw == "cut" else body)
        if flaw == "cut":
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *args):
        pass
