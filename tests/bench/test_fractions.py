from __future__ import annotations

import gguf
import pytest
from bench.fractions import ModelFacts, Peak, decode_limits, facts_of, fractions, prefill_limits, table
from bench.gguf_models import Shape, write_random, write_requantized
from bench.workload import FULL

FACTS = ModelFacts(
    weight_bytes=1000, layer_weights=1000, head_weights=500, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
PEAK = Peak(read_bytes_s=1e6, float_ops_s=1e9, int8_ops_s=4e9)


def test_a_single_stream_reads_weights_and_its_context_for_each_token() -> None:
    assert FACTS.kv_bytes_per_token == 2 * 2 * 2 * 2 * 8
    by_reading, by_float, by_int8 = decode_limits(FACTS, PEAK, 1, 100)
    assert by_reading == pytest.approx(1e6 / (1000 + 100 * 128))
    assert by_float == pytest.approx(1e9 / (2 * 1500 + 4 * 2 * 4 * 8 * 100))
    assert by_int8 == pytest.approx(4 * by_float)


def test_sequences_together_read_the_weights_once() -> None:
    alone = decode_limits(FACTS, PEAK, 1, 0)
    together = decode_limits(FACTS, PEAK, 16, 0)
    assert together[0] == pytest.approx(16 * alone[0])
    assert together[1] == pytest.approx(alone[1])


def test_a_prompt_computes_the_head_for_no_token_and_attends_to_half_of_itself() -> None:
    by_reading, by_float, _ = prefill_limits(FACTS, PEAK, 100)
    assert by_reading == pytest.approx(1e5)
    assert by_float == pytest.approx(1e9 / (2 * 1000 + 4 * 2 * 4 * 8 * 50))


def test_a_figure_is_a_part_of_the_nearer_limit() -> None:
    found = fractions({"single": {"output_tok_s": 10.0}, "shared": {"output_tok_s": 1.0}}, FACTS, PEAK, FULL)
    assert [one.case for one in found] == ["single"]
    assert found[0].of_limit == pytest.approx(10.0 / (1e6 / (1000 + 192 * 128)))
    assert f"{found[0].of_limit:.0%}" in table(found)


@pytest.fixture
def tokenizer_only(tmp_path):  # type: ignore[no-untyped-def]
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 99)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_uint32("llama.attention.head_count_kv", 1)
    writer.add_uint32("llama.embedding_length", 1)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_token_list([f"t{i}" for i in range(64)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_random_model_has_the_sizes_asked_for_and_the_tokenizer_it_was_given(tokenizer_only, tmp_path) -> None:  # type: ignore[no-untyped-def]
    shape = Shape("random", 64, 96, 2, 4, 2, 16, 512)
    path = write_random(shape, tokenizer_only, tmp_path / "random.gguf")
    reader = gguf.GGUFReader(path)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == [f"t{i}" for i in range(64)]
    assert reader.fields["llama.rope.freq_base"].contents() == 10000.0
    found = facts_of(path)
    assert (found.num_layers, found.num_heads, found.num_kv_heads, found.head_dim) == (2, 4, 2, 16)
    assert found.layer_weights == 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
    assert found.head_weights == 64 * 64
    down = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight")
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert values.shape == (64, 96)
    assert abs(values.mean()) < 0.01
    assert 0.01 < values.std() < 0.4


def test_another_format_keeps_the_weights_as_near_as_it_can(tokenizer_only, tmp_path) -> None:  # type: ignore[no-untyped-def]
    source = write_random(Shape("random", 64, 96, 1, 4, 2, 16, 512), tokenizer_only, tmp_path / "random.gguf")
    target = write_requantized(source, tmp_path / "q8_0.gguf", "q8_0")
    before, after = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (source, target))
    assert list(before) == list(after)
    assert after["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"
    assert after["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    old, new = (
        gguf.quants.dequantize(kind["blk.0.attn_q.weight"].data, kind["blk.0.attn_q.weight"].tensor_type)
        for kind in (before, after)
    )
    assert new == pytest.approx(old, abs=float(abs(old).max()) / 127)
