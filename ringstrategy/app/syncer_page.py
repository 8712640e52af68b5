"""What a syncer does now, as text and as a page of plain HTML, from a small HTTP server for whoever reaches it."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

from ringstrategy.app.text import text_table
from ringstrategy.server.store import Taken

_EVERY = 5  # seconds between two looks of a browser
_HEADER = ["learner", "there", *(each.value for each in Taken), "staleness", "goodput", "MB in", "MB out"]

_STYLE = (
    ":root{color-scheme:light dark}body{font:1em/1.4 sans-serif;margin:1.5em}h1{font-size:1.4em}"
    "dl{display:grid;grid-template-columns:max-content auto;gap:.2em 1.5em}dd{margin:0}div{overflow-x:auto}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid #8886}"
    "td:first-child,th:first-child{text-align:left;padding-left:0}"
)


def _rows(report: dict[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            "yes" if told["there"] else "no",
            *(str(told[each.value]) for each in Taken),
            str(told["staleness"]),
            _share(told["goodput"]),
            f"{told['bytes in'] / 1e6:.3g}",
            f"{told['bytes out'] / 1e6:.3g}",
        ]
        for name, told in report["learners"].items()
    ]


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    there = sum(told["there"] for told in report["learners"].values())
    facts = [
        ("state", report["failure"] or ("merging" if report["boot"] else "waiting for the first learner")),
        ("up", f"{report['seconds']:.0f} s"),
        ("learners", f"{there} there, {len(report['learners'])} since the start"),
        ("parameters", f"{report['values']:,}"),
        ("versions of fragments", " ".join(map(str, report["versions"])) or "-"),
        ("goodput", f"{_share(report['goodput'])} of what was sent, or given up for a newer version, was merged"),
    ]
    return facts


def as_text(report: dict[str, Any]) -> str:
    """Lines for a terminal."""
    facts = "\n".join(f"{name}: {value}" for name, value in _facts(report))
    return f"{facts}\n\n{text_table(_HEADER, _rows(report))}\n"


def as_html(report: dict[str, Any]) -> str:
    """A page that needs nothing else, and loads itself anew."""

    def row(cells: list[str], tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    facts = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in _facts(report))
    table = row(_HEADER, "th") + "".join(map(row, _rows(report)))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{_EVERY}">'
        '<meta name="viewport" content="width=device-width"><title>ringstrategy-syncer</title>'
        f"<style>{_STYLE}</style><h1>ringstrategy-syncer</h1><dl>{facts}</dl><div><table>{table}</table></div>"
    )


class Page:
    """Serves `/` and `/text` until `close`.

    Args:
        address: host and port to listen on.
        report: of now; see `Syncer.report`.
    """

    def __init__(self, address: tuple[str, int], report: Callable[[], dict[str, Any]]) -> None:
        class Answers(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                made = {"/": (as_html, "text/html"), "/text": (as_text, "text/plain")}.get(self.path)
                if made is None:
                    self.send_error(404)
                    return
                content = made[0](report()).encode()
                self.send_response(200)
                self.send_header("Content-Type", f"{made[1]}; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            @override
            def log_message(self, format: str, *given: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(address, Answers)
        self._server.daemon_threads = True
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, name="ringstrategy-page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
