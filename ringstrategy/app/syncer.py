"""`ringstrategy-syncer`: keeps and merges the parameters of learners that train with the callback `Decoupled`."""

from __future__ import annotations

import argparse
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ringstrategy.algorithms.parameters.outer import Nesterov
from ringstrategy.app.syncer_page import Page
from ringstrategy.app.syncer_scalars import Scalars
from ringstrategy.extras import require
from ringstrategy.requests import POLL, MailboxServer, Server
from ringstrategy.server.background import address_of, secret_of, text_of
from ringstrategy.server.folder import Folder
from ringstrategy.server.syncer import Syncer

_LOOKS = 3  # into a mailbox: of the learner for the answer to its pull, of the syncer for its push, and one more
_ENDS = (signal.SIGTERM, signal.SIGINT)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """From the command line."""
    parser = argparse.ArgumentParser(
        prog="ringstrategy-syncer",
        description="Keeps and merges the parameters of learners that train with the callback Decoupled. The first "
        "learner brings the parameters and says how to merge. Start the same command again after it was ended in any "
        "way: no merge is lost.",
    )
    parser.add_argument("--bind", default="127.0.0.1:29600", help="host:port for learners; default %(default)s")
    parser.add_argument("--mailbox", help="also for learners that only reach this folder or bucket: a URL of fsspec")
    parser.add_argument("--address-file", type=Path, help="write the address here, for learners, once it is bound")
    parser.add_argument("--secret-file", required=True, help="holds what learners must know: openssl rand -hex 32")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the parameters and the log of merges")
    parser.add_argument("--quorum", type=int, help="merge as soon as so many have pushed; default: what learners say")
    grace = 'seconds to wait for others then, or "auto"; default: what learners say'
    parser.add_argument("--grace", type=lambda text: text if text == "auto" else float(text), help=grace)
    parser.add_argument("--status", help="port, or host:port, of a page for browsers; alone a port is of 127.0.0.1")
    parser.add_argument("--tensorboard", type=Path, help="folder for the numbers of that page, over merges")
    parser.add_argument("--keep-wires", action="store_true", help="keep each push, from which merges can be recomputed")
    parser.add_argument("--idle", type=float, help="end when no learner has been there for so many seconds")
    parser.add_argument(
        "--silent",
        type=float,
        default=10.0,
        help="seconds after which a silent learner is gone; in a mailbox thrice as long",
    )
    parser.add_argument("--certificate", help="encrypt: the file of the certificate and of its key; see openssl req")
    asked = parser.parse_args(arguments)
    if asked.quorum is not None and asked.quorum < 1:
        parser.error(f"--quorum is at least 1, got {asked.quorum}")
    if asked.grace not in (None, "auto") and not 0 <= asked.grace < float("inf"):
        parser.error(f"--grace is seconds >= 0, got {asked.grace}")
    return asked


def main(arguments: list[str] | None = None) -> None:
    """The console script."""
    asked = parse(arguments)
    try:
        with _ends() as (wait, end):
            sys.exit(_serve(asked, wait, end))
    except (ValueError, OSError) as error:
        sys.exit(f"ringstrategy-syncer: {error}")


@contextmanager
def _ends() -> Generator[tuple[Callable[[], object], Callable[[], object]], None, None]:
    """What waits for SIGTERM, SIGINT or a call of the other, which any thread may make."""
    reads, writes = socket.socketpair()
    writes.setblocking(False)
    with reads, writes:
        before = signal.set_wakeup_fd(writes.fileno()), [signal.signal(each, lambda *_: None) for each in _ENDS]
        try:
            yield lambda: reads.recv(1), lambda: writes.send(b"\0")
        finally:
            signal.set_wakeup_fd(before[0])
            for each, handler in zip(_ENDS, before[1], strict=True):
                signal.signal(each, handler)


def _serve(asked: argparse.Namespace, wait: Callable[[], object], end: Callable[[], object]) -> str | None:
    """Until a signal, or `--idle`, or an error: its words."""
    if asked.tensorboard is not None:
        require("ringstrategy-syncer --tensorboard", "tensorboard")
    tls, failed = None, list[BaseException]()
    if asked.certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(asked.certificate)
    with ExitStack() as stack:
        folder = Folder(asked.checkpoint)
        stack.callback(folder.close)
        syncer = Syncer(
            folder,
            quorum=asked.quorum,
            grace=asked.grace,
            auto_least=_LOOKS * POLL if asked.mailbox else 0.0,
            keep_wires=asked.keep_wires,
            parts={"Nesterov": Nesterov},
        )

        def merge() -> None:
            try:
                syncer.run(asked.idle)
            except BaseException as error:
                failed.append(error)
            end()

        merges = threading.Thread(target=merge, name="ringstrategy-syncer", daemon=True)
        merges.start()
        stack.callback(merges.join)
        stack.callback(syncer.close)
        secret, address = secret_of(asked.secret_file), address_of(asked.bind)
        server = Server(address, secret, syncer.answer, gone=syncer.gone, silent=asked.silent, tls=tls)
        stack.callback(server.close)
        if asked.mailbox:
            box = MailboxServer(asked.mailbox, secret, syncer.answer, gone=syncer.gone, silent=3 * asked.silent)
            stack.callback(box.close)
        print("ringstrategy-syncer listens at {}:{}".format(*server.address), flush=True)
        if asked.address_file is not None:
            _tell(asked.address_file, text_of(server.address))
        if asked.status:
            page = Page(address_of(asked.status if ":" in asked.status else f"127.0.0.1:{asked.status}"), syncer.report)
            stack.callback(page.close)
            print("its page is http://{}:{}".format(*page.address), flush=True)
        if asked.tensorboard is not None:
            stack.callback(Scalars(asked.tensorboard, syncer.report).close)
        wait()
    return f"ringstrategy-syncer: {failed[0]}" if failed else None


def _tell(file: Path, address: str) -> None:
    """Whoever reads it finds the whole address, or the one before."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(address + "\n")
    new.replace(file)


if __name__ == "__main__":
    main()
