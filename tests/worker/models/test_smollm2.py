"""Greedy text of the real model equals transformers' on the dequantized weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backends import load
from batches import all_logits, greedy, num_blocks_for
from real_engine import choices_of, engine_over, request_of, run_all
from toy_model import ToyTokenizer

from naru_worker.adapters.models.opening import open_model

gguf = pytest.importorskip("gguf", reason="the weights are decoded with the gguf package, apart from our own code")
transformers = pytest.importorskip("transformers", reason="parity is measured against transformers")
torch = pytest.importorskip("torch", reason="transformers needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.smollm2, pytest.mark.timeout(400)]

MAX_TOKENS = 40
BLOCK_SIZE = 16
BEAM_TOKENS = 16
VOCAB_SIZE = 49152
SMOLLM2_EOS = 2

CPU_LOGIT_TOLERANCE = 0.5
"""Largest gap, in the reference's logits, between its choice and the choice of the `cpu` backend where the two first
part. The cpu backend multiplies 4-bit weights with activations rounded to 8 bits (a relative error of about 0.5 % a
product) and keeps keys and values in half precision; over 30 layers that moves a logit by 0.1 to 0.5 (root mean square,
measured on these prompts), where logits span 30 to 50. So near ties may fall either way; the largest gap measured was
0.25."""

PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a small village,",
    "def fibonacci(n):\n    ",
    "The three primary colors are",
    "Photosynthesis is the process by which",
    "In 1969, humans first",
    "A haiku about autumn:\n",
    "The opposite of hot is",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "To make a cup of tea, first",
    "The largest planet in our solar system is",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a short poem about the sea.<|im_end|>\n<|im_start|>assistant\n",
    "Shakespeare wrote",
    "SELECT name, age FROM users WHERE",
    "Bonjour, je m'appelle",
    "The mitochondria is",
    "Dear Sir or Madam,\n\nI am writing to",
)


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    model = open_model(smollm2_path)
    ids = [model.tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    model.close()
    return ids


@pytest.fixture(scope="module")
def dequantized(smollm2_path: Path) -> Any:
    torch.set_num_threads(1)
    return _dequantized_model(smollm2_path)


def _dequantized_model(path: Path) -> Any:
    reader = gguf.GGUFReader(path)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    # Buffers are not in the state; a fresh module on the CPU computes them.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state = {_hf_name(t.name): torch.from_numpy(_values(t)) for t in reader.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model.eval()


def _values(tensor: Any) -> Any:
    with warnings.catch_warnings():
        # The package's arithmetic on half-precision scales may warn; the values are checked elsewhere.
        warnings.simplefilter("ignore")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2], 0)
    if heads:
        # Files of this kind hold rotary pairs side by side; transformers wants them half a head apart.
        rows, columns = values.shape
        values = values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return np.ascontiguousarray(values)


def _hf_name(name: str) -> str:
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{names[part]}.{suffix}"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


@pytest.fixture(scope="module")
def ref(smollm2_path: Path, prompts: list[list[int]]) -> Iterator[Any]:
    runner = load("ref", smollm2_path, block_size=BLOCK_SIZE, num_blocks=_num_blocks(prompts))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def ref_output(ref: Any, prompts: list[list[int]]) -> list[list[int]]:
    return greedy(ref, prompts, MAX_TOKENS)[0]


def _num_blocks(prompts: list[list[int]]) -> int:
    return num_blocks_for(prompts, BLOCK_SIZE, MAX_TOKENS)


def test_ref_equals_transformers_token_by_token(
    dequantized: Any, prompts: list[list[int]], ref_output: list[list[int]]
) -> None:
    """What transformers would say next after each token of ours is our next token: so it says the same by itself."""
    width = max(map(len, prompts))
    # Left padding: all outputs start in one column.
    rows = [[0] * (width - len(ids)) + ids + out for ids, out in zip(prompts, ref_output, strict=True)]
    mask = [[0] * (width - len(ids)) + [1] * (len(ids) + MAX_TOKENS) for ids in prompts]
    with torch.inference_mode():
        logits = dequantized(
            torch.tensor(rows), attention_mask=torch.tensor(mask), logits_to_keep=MAX_TOKENS + 1, use_cache=False
        ).logits
    assert ref_output == logits[:, :-1].argmax(-1).tolist()


def test_cpu_parts_from_the_reference_only_at_near_ties(
    smollm2_path: Path, ref: Any, prompts: list[list[int]], ref_output: list[list[int]]
) -> None:
    cpu = load("cpu", smollm2_path, block_size=BLOCK_SIZE, num_blocks=_num_blocks(prompts), kv_format="f16")
    ours, _ = greedy(cpu, prompts, MAX_TOKENS)
    cpu.close()
    for prompt, expected, got in zip(prompts, ref_output, ours, strict=True):
        first = next((i for i in range(MAX_TOKENS) if expected[i] != got[i]), None)
        if first is None:
            continue
        row = all_logits(ref, prompt + expected[:first])[-1]
        gap = float(row[expected[first]] - row[got[first]])
        assert gap < CPU_LOGIT_TOLERANCE, f"at output token {first} the cpu backend is off by {gap:.3f}"


@pytest.mark.parametrize(("prompt_index", "num_beams", "length_penalty"), [(0, 3, 1.0), (12, 4, 2.0)])
def test_beams_equal_transformers_on_ref_and_score_as_well_on_cpu(
    smollm2_path: Path,
    ref: Any,
    dequantized: Any,
    prompts: list[list[int]],
    prompt_index: int,
    num_beams: int,
    length_penalty: float,
) -> None:
    prompt = prompts[prompt_index]
    with torch.inference_mode():
        found = dequantized.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            max_new_tokens=BEAM_TOKENS,
            length_penalty=length_penalty,
            eos_token_id=SMOLLM2_EOS,
            pad_token_id=SMOLLM2_EOS,
        )[:, len(prompt) :].tolist()
    expected = [tuple(row[: row.index(SMOLLM2_EOS) + 1] if SMOLLM2_EOS in row else row) for row in found]

    def search(runner: Any) -> list[tuple[int, ...]]:
        # Ids alone are looked at: what their text is does not matter.
        engine, scheduler = engine_over(runner, ToyTokenizer(), VOCAB_SIZE, (SMOLLM2_EOS,))
        request = request_of(
            prompt, beam_width=num_beams, n=num_beams, max_tokens=BEAM_TOKENS, length_penalty=length_penalty
        )
        return choices_of(run_all(engine, scheduler, [request]))

    def score(output: tuple[int, ...]) -> float:
        rows = all_logits(ref, [*prompt, *output])[len(prompt) - 1 : -1].astype(np.float64)
        logprobs = rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) - rows.max(1)[:, None]
        total = float(logprobs[np.arange(len(output)), output].sum())
        return float(total / len(output) ** length_penalty)

    assert search(ref) == expected
    cpu = load("cpu", smollm2_path, block_size=BLOCK_SIZE, num_blocks=64, kv_format="f16")
    best = search(cpu)[0]
    cpu.close()
    # By the reference's own score it is as good a text, but for what a near tie may cost.
    assert score(best) > score(expected[0]) - CPU_LOGIT_TOLERANCE / len(expected[0]) ** (length_penalty - 1)
