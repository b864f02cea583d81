"""Groups of processes: the answers of one process, and a rank that is lost is named.

Starting processes takes seconds, so there are two groups, each of which ends with a loss.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

# A busy machine takes long to import torch in four processes.
pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
torch = pytest.importorskip("torch")

from backends import load  # noqa: E402
from batches import all_logits, batch_of, greedy, lanes_for  # noqa: E402
from gguf_builder import Q4_0, GgufTensor, build, model_metadata, model_tensors  # noqa: E402
from sampling_batches import greedy_batch  # noqa: E402
from tiny_models import TinySpec  # noqa: E402

from naru_proto.errors import LoadError  # noqa: E402
from naru_worker.adapters.ops.protocol import Runner, RunnerOptions  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel import follower_process, opening  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.errors import RankLost  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.follower_process import gpu_of  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.group_runner import load_over_group  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.joining import join  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.opening import open_group  # noqa: E402
from naru_worker.adapters.ops.tensor_parallel.rank_group import RankGroup  # noqa: E402

OPTIONS = RunnerOptions(
    block_size=16, num_blocks=64, max_num_tokens=512, max_num_seqs=32, max_model_len=512, kv_format="f32"
)
BIASED = TinySpec(bias=True, hidden_size=256, intermediate_size=200, max_positions=512)
GROUPED = TinySpec("qwen2", num_heads=8, num_kv_heads=2, tied=True)
PROMPTS = [list(range(5, 45)), [7, 8, 9]]


def quantized_file(path: Path) -> Path:
    """A tied model whose matrices are q4_0."""
    spec = TinySpec(hidden_size=64, tied=True)
    tensors = []
    for tensor in model_tensors(spec):
        if len(tensor.shape) == 1:
            tensors.append(tensor)
            continue
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
        tensors.append(GgufTensor(tensor.name, tensor.shape, Q4_0, raw.tobytes()))
    path.write_bytes(build(model_metadata(spec), tensors))
    return path


def assert_same_as_one_process(group: RankGroup, size: int, path: Path, num_tokens: int) -> None:
    one, many = load("ref", path, max_model_len=512), load_over_group(group, size, path, "ref", OPTIONS)
    token_ids = [3 + i % 200 for i in range(num_tokens)]
    expected = all_logits(one, token_ids)
    # The ranks' parts of a sum are rounded in another order: some float32 roundings (6e-8) of the largest number.
    got = all_logits(many, token_ids)
    np.testing.assert_allclose(got, expected, rtol=0, atol=4e-6 * float(np.abs(expected).max()))
    assert np.array_equal(all_logits(many, token_ids), got), "the order of sums is fixed"
    assert greedy(many, PROMPTS, 8)[0] == greedy(one, PROMPTS, 8)[0]
    many.release_blocks(1, 3)
    assert all_logits(many, token_ids).shape == expected.shape
    many.close()
    one.close()


def assert_rank_0_samples_and_a_failure_there_costs_one_step(runner: Runner) -> None:
    lanes = lanes_for(PROMPTS, 16, 1)
    batch = batch_of([(lane, len(lane.token_ids)) for lane in lanes], 16)
    best = runner.logits(batch).argmax(-1).tolist()
    assert runner.run(batch, greedy_batch(2, 259)).token_ids.tolist() == best
    with pytest.raises(IndexError):
        runner.run(batch, greedy_batch(1, 259))
    assert runner.run(batch, greedy_batch(2, 259)).token_ids.tolist() == best


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_ranks_answer_as_one_process_until_one_is_killed(
    tiny_model: Callable[[TinySpec], Path], tmp_path: Path
) -> None:
    group = RankGroup(2, "gloo")
    try:
        # Sums of more than 256 KiB, and of less.
        assert_same_as_one_process(group, 2, tiny_model(BIASED), 300)
        assert_same_as_one_process(group, 2, quantized_file(tmp_path / "model.gguf"), 20)
        with pytest.raises(LoadError, match="tensor_parallel_size must be a divisor of num_heads"):
            load_over_group(group, 2, tiny_model(TinySpec(num_heads=3, num_kv_heads=3, head_dim=16)), "ref", OPTIONS)
        with pytest.raises(RuntimeError, match="is a rank of a group already"):
            join(None, group.collectives, 2, "gloo", 1.0)
        runner = load_over_group(group, 2, tiny_model(GROUPED), "ref", OPTIONS)
        assert_rank_0_samples_and_a_failure_there_costs_one_step(runner)
        [pid] = group.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 1 of 2 is lost: its process was ended by signal 9") as caught:
            all_logits(runner, [1, 2, 3])
        for call in (lambda: all_logits(runner, [1]), lambda: runner.release_blocks(1, 1), lambda: group.wait(99)):
            with pytest.raises(RankLost) as again:
                call()
            assert again.value is caught.value
        runner.close()
    finally:
        group.close()
    group.close()
    assert not is_alive(pid)


def test_four_ranks_answer_as_one_process_until_one_hangs(tiny_model: Callable[[TinySpec], Path]) -> None:
    group = RankGroup(4, "gloo")
    try:
        # Over the first two, then over all: those who take no part are not waited for.
        assert_same_as_one_process(group, 2, tiny_model(GROUPED), 20)
        assert_same_as_one_process(group, 4, tiny_model(GROUPED), 20)
        half = load_over_group(group, 2, tiny_model(GROUPED), "ref", OPTIONS)
        runner = load_over_group(group, 4, tiny_model(GROUPED), "ref", OPTIONS)
        told: list[RankLost] = []
        group.tell_loss(told.append)
        group.timeout_s = 0.5
        pids = group.pids
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RankLost, match=r"rank 2 of 4 is lost: no sign of life for 0\.5 s"):
            all_logits(runner, [1, 2, 3])
        with pytest.raises(RankLost) as caught:
            all_logits(half, [1, 2, 3])
        assert told == [caught.value]
    finally:
        group.close()
    assert not any(map(is_alive, pids))


def test_a_rank_that_does_not_start_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_process, "MODULE", "naru_worker.no_such_module")
    with pytest.raises(LoadError, match=r"brought together: rank 1 of 2 is lost: .* ended with status 1;"):
        open_group("ref", 2, 120.0)


def test_too_few_gpus_are_told_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    words = r"num_accelerators is 2, and this process sees 1 GPUs \(CUDA_VISIBLE_DEVICES is 'GPU-a'\); give the pod 2"
    with pytest.raises(LoadError, match=words):
        open_group("cuda", 2, 120.0)


@pytest.mark.parametrize(
    ("visible", "names"), [(None, ["0", "3"]), ("4, 5,6,7", ["4", "7"]), ("GPU-a,GPU-b", ["GPU-a"])]
)
def test_each_rank_sees_its_own_gpu(visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu_of(rank) for rank in (0, 3)[: len(names)]] == names
    if len(names) == 1:
        with pytest.raises(ValueError, match="no GPU for rank 3"):
            gpu_of(3)


def test_a_group_has_at_least_two_ranks() -> None:
    with pytest.raises(ValueError, match="size is 1"):
        RankGroup(1, "gloo")


def test_a_rank_that_ends_while_it_joins_is_lost_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_a_rank.py").write_text(
        "import socket, struct, sys\n"
        "orders, hello = socket.socket(fileno=int(sys.argv[1])), b'{\"done\": 0}'\n"
        "orders.sendall(struct.pack('<II', len(hello), 0) + hello)\n"
        "sys.exit(7 if orders.recv(1) else 8)\n"
    )
    monkeypatch.setattr(follower_process, "MODULE", "half_a_rank")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RankLost, match="rank 1 of 2 is lost: its process has ended with status 7"):
        RankGroup(2, "gloo", timeout_s=10.0, start_timeout_s=30.0)
