"""Triton's config.pbtxt: what is honoured, what is passed over, what is refused, and what is no config at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_models import DOUBLER_CONFIG

from naru_proto.errors import LoadError
from naru_proto.registry import TensorRecord
from naru_worker.adapters.onnx.text_format import parse_text_format
from naru_worker.adapters.onnx.triton_config import parse_config


def test_a_config_says_batches_tensors_and_delay() -> None:
    config = parse_config(DOUBLER_CONFIG, "c")
    assert config.max_batch_size == 8
    assert config.inputs == (TensorRecord("x", "FP32", (4,)),)
    assert config.outputs == (TensorRecord("y", "FP32", (4,)),)
    assert config.max_delay_s == 0.02
    assert config.ignored == ("instance_group",)


def test_the_text_format_as_people_write_it() -> None:
    text = r"""
      a: 1, a: -0x10; b { c: 'it\'s' "\x41\102" } # a comment: { is none
      d < e: TYPE_X f: 1.5e3 > g: [1, 2, 3] h: [] i [{j: true}, {j: false}] k: .5f
    """
    assert parse_text_format(text, "t") == {
        "a": [1, -16],
        "b": [{"c": ["it'sAB"]}],
        "d": [{"e": ["TYPE_X"], "f": [1500.0]}],
        "g": [1, 2, 3],
        "h": [],
        "i": [{"j": ["true"]}, {"j": ["false"]}],
        "k": [0.5],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {", "line 1: 'the end' stands where a field's name"),
        ("a: 1\nb: }", "line 2: '}' stands where a value"),
        ("a [1]", "'1' stands where a value"),
        ("a: [1 2]", "'2' stands where a comma"),
        ("a 1", "'1' stands where a value"),
        ('a: "open', "line 1: '\"open' cannot stand there"),
        ("[type.x]: 1", "'\\['"),
        ("a " + "{ a " * 40, "nests deeper"),
        ("=", "cannot stand there"),
    ],
)
def test_a_broken_text_is_named_by_its_line(text: str, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        parse_text_format(text, "t")


@given(st.text(alphabet="ab:{}[]<>,;\"'\\#x0-1. \n", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_text_format(text, "t")
    except LoadError:
        pass


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("sequence_batching {}", "sequence_batching"),
        ("ensemble_scheduling { step [] }", "ensemble_scheduling"),
        ('model_operations { op_library_filename: "evil.so" }', "model_operations"),
        ('platform: "tensorrt_plan"', "platform"),
        ('backend: "python"', "platform"),
        ("model_transaction_policy { decoupled: true }", "decoupled"),
        ("max_batch_size: -1", "max_batch_size"),
        ("max_batch_size: 1.5", "max_batch_size"),
        ("dynamic_batching { max_queue_delay_microseconds: -1 }", "max_queue_delay_microseconds"),
        ("dynamic_batching { preferred_batch_size: [0] }", "preferred_batch_size"),
        ("version_policy { specific { versions: [] } }", "version_policy"),
        ('default_model_filename: "../../etc/passwd"', "default_model_filename"),
        ('input { name: "x" data_type: TYPE_BF16 dims: 1 }', "data_type"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 0 }', "dims"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }', "reshape"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 1 optional: true }', "optional"),
        ('input { name: "" data_type: TYPE_FP32 dims: 1 }', "input"),
        ("input: 3", "input"),
        ('input [{name: "x" data_type: TYPE_FP32}, {name: "x" data_type: TYPE_FP32}]', "input"),
    ],
)
def test_what_would_change_results_or_cannot_be_is_refused(text: str, param: str) -> None:
    with pytest.raises(LoadError) as caught:
        parse_config(text, "c")
    assert caught.value.param == param
