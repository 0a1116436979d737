"""The newest numbers of metrics.jsonl as Prometheus' text format, served over HTTP by a thread of the run."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from redline.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class PrometheusServer:
    """GET /metrics gives one gauge a number: redline_train_loss, redline_valid_loss, redline_train_step, ...

    Args:
        address, port: where it listens; port 0 for any that is free.
        labels: of every gauge, for example {"run": "mine"}.

    Raises: ConfigError when it cannot listen there.
    """

    def __init__(self, address: str, port: int, labels: Mapping[str, str]) -> None:
        self._labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        try:
            self._server = ThreadingHTTPServer((address, port), _handler(self.text))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--prometheus-port {port}: cannot listen on {address}: {getattr(error, 'strerror', error)}.",
                why="another program may use that port, or the address is not this machine's.",
                mend="name another port, or another --prometheus-address.",
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Let these be the newest values; `step` becomes one of them, under the prefix of the first."""
        prefix = next(iter(scalars), "train/").partition("/")[0]
        with self._lock:
            self._values |= {**scalars, f"{prefix}/step": float(step)}

    def text(self) -> str:
        """The newest values, each with its type."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, value in values:
            gauge = "redline_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            lines += [f"# TYPE {gauge} gauge", f"{gauge}{{{self._labels}}} {value!r}"]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _handler(text: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] in ("/", "/metrics")
            content = text().encode() if found else b"only /metrics is here\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """A run's output is not a web server's log."""

    return Handler
