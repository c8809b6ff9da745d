# SPDX-License-Identifier: MIT
"""`ucm-sglang validate` against a fake server: phases, exit status, report."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ucm.cli.main import main

if TYPE_CHECKING:
    from ucm.testing.fake_sglang import FakeSGLang


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(fake: FakeSGLang, *arguments: str) -> int:
    return main(["validate", "--url", fake.url, "--settle", "0.05", *arguments])


def report(path: str = "report.json") -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text())
    return document


def test_a_server_that_restores_everything_passes(fake_sglang: FakeSGLang) -> None:
    assert run(fake_sglang) == 0
    cached = {phase["name"]: phase["cached"] for phase in report()["phases"]}
    assert cached == {
        "cold": {"device": 0, "host": 0, "storage": 0},
        "warm-l1": {"device": 256, "host": 0, "storage": 0},
        "evicted-l2": {"device": 0, "host": 256, "storage": 0},
        "flushed-l3": {"device": 0, "host": 0, "storage": 256},
        "longer-l3": {"device": 0, "host": 0, "storage": 256},
        "turn-1-cold": {"device": 0, "host": 0, "storage": 0},
        "turn-2-l1": {"device": 256, "host": 0, "storage": 0},
        "turn-3-l3": {"device": 0, "host": 0, "storage": 320},
        "at-once-cold": {"device": 0, "host": 0, "storage": 0},
        "at-once-l3": {"device": 0, "host": 0, "storage": 1024},
    }


def test_a_server_that_loses_its_storage_fails(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sglang.storage_loses = True
    assert run(fake_sglang) == 1
    assert not report()["ok"]
    assert "flushed-l3: storage gave 0 tokens, expected 256" in capsys.readouterr().out


def test_a_server_that_restores_wrong_numbers_fails(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sglang.storage_damages = True
    assert run(fake_sglang) == 1
    assert "flushed-l3: logprobs differ by 0.1 from the uncached answer" in capsys.readouterr().out


def test_a_tolerance_accepts_inexact_kernels(fake_sglang: FakeSGLang) -> None:
    fake_sglang.storage_damages = True
    assert run(fake_sglang, "--logprob-tolerance", "0.2") == 0


def test_report_only_exits_with_0_and_still_reports_the_failure(fake_sglang: FakeSGLang) -> None:
    fake_sglang.storage_loses = True
    assert run(fake_sglang, "--report-only") == 0
    assert not report()["ok"]


def test_a_restarted_server_continues_the_report(fake_sglang: FakeSGLang) -> None:
    assert run(fake_sglang, "--selection", "plugin") == 0
    fake_sglang.restart()
    assert run(fake_sglang, "--after-restart", "report.json") == 0
    document = report()
    restored = {
        p["name"]: p["cached"]["storage"] for p in document["phases"] if p["name"].startswith("restart")
    }
    assert restored == {
        "restart": 256,
        "restart-longer": 384,
        "restart-turn-3": 384,
        "restart-at-once": 1024,
    }
    assert document["phases"][0]["name"] == "cold"
    assert document["selection"] == "plugin"


def test_a_restart_that_restores_nothing_fails(fake_sglang: FakeSGLang) -> None:
    assert run(fake_sglang) == 0
    fake_sglang.restart()
    fake_sglang.storage_loses = True
    assert run(fake_sglang, "--after-restart", "report.json") == 1


def test_a_used_cache_does_not_turn_cold_prompts_into_hits(fake_sglang: FakeSGLang) -> None:
    assert [run(fake_sglang), run(fake_sglang)] == [0, 0]


def test_the_same_seed_finds_its_own_pages_and_fails(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake_sglang, "--seed", "1") == 0
    assert run(fake_sglang, "--seed", "1") == 1
    assert "cold: 256 tokens of a new prompt came from a cache" in capsys.readouterr().out


def test_l2_is_left_out_when_l1_takes_too_many_tokens_to_fill(fake_sglang: FakeSGLang) -> None:
    assert run(fake_sglang, "--max-filler-tokens", "100") == 0
    assert "evicted-l2" not in [phase["name"] for phase in report()["phases"]]


def test_without_metrics_the_wait_is_fixed(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sglang.metrics = False
    assert run(fake_sglang) == 0
    assert "waiting 0.05 s for backups" in capsys.readouterr().err


def test_the_table_shows_each_phase_and_the_verdict(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    run(fake_sglang)
    out = capsys.readouterr().out
    assert "256 L3" in out
    assert "OK: 1856 of 1856 restorable tokens came from storage in 4 phases" in out


def test_an_unreachable_server_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert main(["validate", "--url", f"http://127.0.0.1:{port}"]) == 2
    assert f"http://127.0.0.1:{port}/server_info" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://[bad"])
def test_a_wrong_url_is_a_usage_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--url", url]) == 2
    assert url in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prompt-tokens", "-5"),
        ("--prompt-tokens", "0"),
        ("--output-tokens", "0"),
        ("--at-once", "x"),
        ("--expect-fraction", "1.5"),
        ("--expect-fraction", "nan"),
        ("--settle", "-1"),
    ],
)
def test_a_value_out_of_range_is_a_usage_error(
    option: str, value: str, fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run(fake_sglang, option, value)
    assert exit_info.value.code == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (100, "leaves nothing on storage"),  # Below the prefetch threshold.
        (
            320,
            "leaves nothing on storage",
        ),  # State lies at its end only, and one token is computed.
        (1000, "the server takes at most 1024"),
    ],
)
def test_a_prompt_length_that_shows_nothing_is_a_usage_error(
    tokens: int, message: str, fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake_sglang, "--prompt-tokens", str(tokens)) == 2
    assert message in capsys.readouterr().err


def test_a_storage_directory_that_does_not_exist_is_a_usage_error(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake_sglang, "--storage-dir", "/nowhere") == 2
    assert "/nowhere" in capsys.readouterr().err


def test_a_server_without_storage_is_a_usage_error(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sglang.info["hicache_storage_backend"] = None
    assert run(fake_sglang) == 2
    assert "--hicache-storage-backend" in capsys.readouterr().err


def test_a_missing_report_to_continue_is_a_usage_error(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake_sglang, "--after-restart", "none.json") == 2
    assert "none.state.json" in capsys.readouterr().err


def test_another_model_after_the_restart_is_a_usage_error(
    fake_sglang: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    run(fake_sglang)
    fake_sglang.model["model_path"] = "other/model"
    assert run(fake_sglang, "--after-restart", "report.json") == 2
    assert "other/model" in capsys.readouterr().err


def test_pools_are_read_from_where_the_server_says(fake_sglang: FakeSGLang, tmp_path: Path) -> None:
    run(fake_sglang)
    shard = tmp_path / "kv" / "sglang_v2" / "mamba_64x1" / "0ab"
    shard.mkdir(parents=True)
    (shard / ("0ab" + "0" * 29)).write_bytes(bytes(64))
    fake_sglang.info["hicache_storage_backend_extra_config"] = json.dumps(
        {"storage_backends": f"{tmp_path}/kv"}
    )
    run(fake_sglang, "--after-restart", "report.json")
    assert report()["pools"] == [
        {"name": "mamba", "namespace": "sglang_v2/mamba_64x1", "page_bytes": 64, "pages": 1, "bytes": 64}
    ]
