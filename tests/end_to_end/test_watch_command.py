"""`deat watch`: the report of runs on this machine's own address, live, and without writing anything."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deat.cli.main import main
from deat.cli.watch_server import WatchCommand, make_server
from deat.errors import DataError, UsageError
from deat.training.epoch_records import append_record, read_history
from helpers.browser import ABSENT, browser
from helpers.runs import make_run


@contextmanager
def serving(*runs: Path, **options: Any) -> Iterator[int]:
    """The port of a server that runs in a thread."""
    server = make_server(WatchCommand(runs=tuple(map(str, runs)), port=0, **options))
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers={"Host": f"127.0.0.1:{port}" if host is None else host})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def status(port: int) -> Any:
    return json.loads(ask(port, "/status")[2])


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes() if p.is_file() else b"", p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def finish_epoch(run: Path) -> None:
    """Write one more line of history, as a training does at the end of an epoch."""
    last = read_history(run / "history.jsonl")[-1]
    append_record(run / "history.jsonl", type(last)(**{**vars(last), "epoch": last.epoch + 1}))


def test_the_page_follows_several_runs_while_they_train_and_writes_nothing(tmp_path):
    shares = {"natural": 0.9, "pgd-20": 0.5}
    done = make_run(tmp_path / "done", "pgd-7", shares=shares)
    live = make_run(tmp_path / "live", "m+deat", finished=2)
    with serving(done, live) as port:
        before = snapshot(tmp_path)
        first = status(port)
        states = {run["name"]: (run["state"], run["epoch"], run["epochs"]) for run in first["runs"]}
        assert states == {"pgd-7": ("trained and evaluated", 4, 4), "m+deat": ("training", 2, 4)}
        assert first["problems"] == []
        page = ask(port, "/report")[2]
        assert "pgd-7" in page
        assert "2 of 4 epochs" in page
        assert status(port)["version"] == first["version"]
        assert snapshot(tmp_path) == before
        finish_epoch(live)
        second = status(port)
        assert second["version"] != first["version"]
        assert {run["name"]: run["epoch"] for run in second["runs"]} == {"pgd-7": 4, "m+deat": 3}
        assert "3 of 4 epochs" in ask(port, "/report")[2]


def test_a_folder_of_runs_is_followed_before_the_first_of_them_begins(tmp_path):
    with serving(tmp_path) as port:
        assert status(port)["runs"] == []
        assert "no run yet" in status(port)["problems"][0]
        assert ask(port, "/report")[0] == 200
        make_run(tmp_path / "first", finished=1)
        assert [run["epoch"] for run in status(port)["runs"]] == [1]


def test_a_damaged_run_is_named_and_the_others_are_shown(tmp_path):
    make_run(tmp_path / "good", "pgd-7")
    (make_run(tmp_path / "bad") / "evaluation.json").write_text("[]")
    (make_run(tmp_path / "half") / "run.json").write_text('{"settings"')
    with serving(tmp_path) as port:
        found = status(port)
        assert [run["name"] for run in found["runs"]] == ["pgd-7"]
        assert len(found["problems"]) == 2
        assert ask(port, "/report")[0] == 200


def test_numbers_that_json_lacks_do_not_end_the_page(tmp_path):
    run = make_run(tmp_path / "run", finished=1)
    line = json.loads((run / "history.jsonl").read_text())
    (run / "history.jsonl").write_text(json.dumps({**line, "loss": float("nan")}) + "\n")
    with serving(run) as port:
        found = status(port)
    assert [one["loss"] for one in found["runs"]] == [None] or found["problems"]


@pytest.mark.parametrize(
    "path", ["/../run.json", "/run.json", "/report/", "/%2e%2e/run.json", "//etc/passwd", "/watch.js/..", "*"]
)
def test_no_path_reaches_a_file(path, tmp_path):
    make_run(tmp_path / "run")
    with serving(tmp_path / "run") as port:
        assert ask(port, path)[0] == 404


@pytest.mark.parametrize("host", ["", "evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:80"])
def test_a_request_under_another_name_is_refused(host, tmp_path):
    with serving(tmp_path) as port:
        for path in ("/", "/status", "/report"):
            code, _, text = ask(port, path, host=host)
            assert code == 403
            assert "run" not in text
        assert ask(port, "/status", host=f"localhost:{port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_answered(method, tmp_path):
    with serving(tmp_path) as port:
        assert ask(port, "/", method)[0] == 501
        assert ask(port, "/", "HEAD")[::2] == (200, "")


def test_the_pages_allow_no_foreign_content_and_are_not_stored(tmp_path):
    make_run(tmp_path / "run", "<script>alert(1)</script>")
    with serving(tmp_path, title="<b>title") as port:
        _, headers, page = ask(port, "/")
        assert "&lt;b&gt;title" in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        for path in ("/", "/status", "/report", "/watch.js", "/watch.css", "/page.css"):
            code, headers, text = ask(port, path)
            assert code == 200
            assert headers["Cache-Control"] == "no-store"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert path == "/status" or "<script>alert" not in text
            assert headers["Content-Type"].startswith("application/json") == (path == "/status")


def test_what_cannot_be_served_is_refused(tmp_path, capsys):
    with pytest.raises(DataError, match="there is no folder"):
        make_server(WatchCommand(runs=(str(tmp_path / "nothing"),), port=0))
    with pytest.raises(UsageError, match="--interval 0"):
        make_server(WatchCommand(runs=(str(tmp_path),), port=0, interval=0.0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["watch", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 2
    assert "--port 0" in capsys.readouterr().err


def test_ctrl_c_ends_it_with_success(children, tmp_path):
    (tmp_path / "runs").mkdir()
    pid = children.start("watch", "runs", "--port", "0", cwd=tmp_path)
    for _ in range(200):
        if (tmp_path / "out").is_file() and "http://127.0.0.1:" in (tmp_path / "out").read_text():
            break
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert children.wait(pid) == 0


@pytest.mark.skipif(bool(ABSENT), reason=ABSENT)
def test_the_page_in_a_browser_shows_a_new_epoch_without_a_click_and_asks_for_nothing_else(tmp_path):
    run = make_run(tmp_path / "runs" / "live", finished=1)
    (tmp_path / "browser").mkdir()
    with serving(tmp_path / "runs", interval=0.2) as port, browser(tmp_path / "browser") as page:
        page.visit(f"http://127.0.0.1:{port}/")
        shown = "return document.querySelector('iframe:not(.waiting)').contentDocument.body.innerText"

        def wait_for(script: str, text: str) -> None:
            for _ in range(100):
                if text in str(page.js(script)):
                    return
                time.sleep(0.1)
            raise AssertionError(page.js(script))

        wait_for("return document.getElementById('runs').innerText", "1/4")
        wait_for(shown, "1 of 4 epochs")
        page.js("document.querySelector('iframe:not(.waiting)').contentWindow.scrollTo(0, 120)")
        finish_epoch(run)
        wait_for("return document.getElementById('runs').innerText", "2/4")
        wait_for(shown, "2 of 4 epochs")
        assert page.js("return document.querySelector('iframe:not(.waiting)').contentWindow.scrollY") == 120
        assert page.logs("browser") == []
        assert {address.split("/")[2] for address in page.requested()} == {f"127.0.0.1:{port}"}
