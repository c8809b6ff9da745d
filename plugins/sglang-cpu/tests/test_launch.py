# SPDX-License-Identifier: MIT
"""Starting, watching and ending servers, with stand-ins that behave as badly as a server can."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from sglang_cpu import launch
from sglang_cpu.launch import Server, ServerFailedError, command, environment, free_port, running_server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEALTHY = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

STUBBORN_CHILD = """
import subprocess, sys

CHILD = '''
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", CHILD])
"""

DEAD_CHILD = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
time.sleep(600)
"""


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    return tmp_path


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have `running_server` run a Python program; its argument is the port."""

    def serve_with(program: str) -> None:
        monkeypatch.setattr(
            launch, "command", lambda _model_path, port, *_: [sys.executable, "-c", program, str(port)]
        )

    return serve_with


def test_the_command_is_what_an_operator_types(model_path: Path) -> None:
    words = command(model_path, 30001, "--page-size", "128")

    assert words[0].endswith("/sglang")
    assert words[1] == "serve"
    assert " ".join(words).endswith("--mamba-radix-cache-strategy extra_buffer --page-size 128")
    assert "--port 30001" in " ".join(words)


def test_a_model_with_a_tokenizer_is_served_with_it(model_path: Path) -> None:
    assert "--skip-tokenizer-init" in command(model_path, 1)

    (model_path / "tokenizer.json").touch()

    assert "--skip-tokenizer-init" not in command(model_path, 1)


def test_the_environment_keeps_what_it_does_not_set() -> None:
    assert environment({"HOME": "/root", "SGLANG_USE_CPU_ENGINE": "1"}) == {
        "HOME": "/root",
        "OMP_NUM_THREADS": "1",
        "SGLANG_PLATFORM": "cpu_reference",
        "SGLANG_USE_CPU_ENGINE": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_a_healthy_server_is_handed_over_and_ends_with_the_block(
    model_path: Path, serve_with: Callable[[str], None]
) -> None:
    serve_with(HEALTHY)

    with running_server(model_path, log=model_path / "log") as server:
        assert server.alive() == [server.process.pid]

    assert server.alive() == []
    assert server.process.returncode is not None


def test_a_server_ends_when_the_block_fails(model_path: Path, serve_with: Callable[[str], None]) -> None:
    serve_with(HEALTHY)

    with pytest.raises(KeyError), running_server(model_path, log=model_path / "log") as server:
        raise KeyError

    assert server.alive() == []


def test_children_that_ignore_every_request_end_too(
    model_path: Path, serve_with: Callable[[str], None]
) -> None:
    serve_with(STUBBORN_CHILD + HEALTHY)

    with running_server(model_path, log=model_path / "log") as server:
        assert len(server.alive()) == 2

    assert server.alive() == []


def test_children_end_that_outlived_the_server(model_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], start_new_session=True)
    process.wait()
    server = Server(process, free_port(), model_path / "log")
    assert len(server.alive()) == 1

    server.stop()

    assert server.alive() == []


def test_a_killed_server_has_no_chance_to_clean_up(
    model_path: Path, serve_with: Callable[[str], None]
) -> None:
    serve_with(STUBBORN_CHILD + HEALTHY)

    with running_server(model_path, log=model_path / "log") as server:
        server.kill()

        assert server.alive() == []
        assert server.process.returncode == -signal.SIGKILL


def test_a_server_that_ends_early_is_reported_with_its_last_words(
    model_path: Path, serve_with: Callable[[str], None]
) -> None:
    serve_with("raise SystemExit('no such model')")

    with (
        pytest.raises(ServerFailedError, match=r"status 1\n.*no such model"),
        running_server(model_path, log=model_path / "log"),
    ):
        pass


def test_a_dead_child_is_noticed_long_before_the_deadline(
    model_path: Path, serve_with: Callable[[str], None]
) -> None:
    serve_with(DEAD_CHILD)
    start = time.monotonic()

    with (
        pytest.raises(ServerFailedError, match="a process of the server died"),
        running_server(model_path, log=model_path / "log", deadline_s=300),
    ):
        pass

    assert time.monotonic() - start < 60


def test_a_server_that_never_answers_is_given_up(
    model_path: Path, serve_with: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve_with("import time; print('loading', flush=True); time.sleep(600)")

    with (
        pytest.raises(ServerFailedError, match=r"within 9\.0 s\nloading"),
        running_server(model_path, log=model_path / "log", deadline_s=9.0) as server,
    ):
        assert server.alive() == []

    assert re.search(r": [5-9] s, loading", capsys.readouterr().err)
