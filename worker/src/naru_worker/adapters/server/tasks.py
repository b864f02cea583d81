"""A request with a task on its way from the board to whatever does it, and its answer on the way back.

Tokenizing is done here, by any model with a tokenizer. Texts to pool are tokenized here and computed by the model's
engine: an encoder's takes them together, a decoder's one by one. Tensors are read here and go to the engine as they
are. Called by the board.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from naru_proto.errors import InvalidRequest, NaruError
from naru_proto.v1 import worker_pb2
from naru_worker.adapters.engine.batch_engine import BatchEngine
from naru_worker.adapters.engine.batch_request import BatchInput, BatchRequest
from naru_worker.adapters.engine.batch_runner import EncoderInput
from naru_worker.adapters.engine.deltas import SequenceDelta, UsageCounts
from naru_worker.adapters.engine.loaded import LoadedModel, PoolingFacts
from naru_worker.adapters.engine.loop import EngineLoop
from naru_worker.adapters.engine.task_output import VECTOR_BYTES, TaskOutput, Tokens, Vector
from naru_worker.adapters.server.admission import check_can
from naru_worker.adapters.server.gathering import Gathering, part_id
from naru_worker.adapters.server.keeper import INLINE_CHARS, Aside, Asked, Keeper
from naru_worker.adapters.server.pooling_inputs import read_inputs
from naru_worker.adapters.server.stream import LiveRequest
from naru_worker.adapters.server.task_check import num_text_chars
from naru_worker.adapters.server.tensors import datatype_of, read_tensors
from naru_worker.adapters.server.tokenizing import tokenize
from naru_worker.adapters.server.vectors import VectorForm
from naru_worker.core.fair_order import part_numbers
from naru_worker.core.request import FinishReason, Request
from naru_worker.core.sampling import SamplingParams

EMBED, SCORE, TENSORS = "embed", "score", "tensors"
_VECTOR_SHARE = 4
"""Vectors leave in pieces of a message's largest size by this."""
_INLINE_BYTES = 1 << 16
"""Of tensors that are read at once: tens of microseconds."""


class Tasks:
    """Asyncio thread only."""

    def __init__(self, loop: EngineLoop, keeper: Keeper, max_message_bytes: int) -> None:
        self._loop = loop
        self._keeper = keeper
        self._aside = Aside(keeper)
        self._max_message_bytes = max_message_bytes

    def admit(self, live: LiveRequest, model: LoadedModel, asked: Asked) -> None:
        """Has a checked task done by its model.

        Raises:
            NaruError: the model cannot do it.
        """
        live.untold_revision = model.facts.revision
        task = asked.message.WhichOneof("task")
        if task == "tokenize":
            self._tokenize(live, model, asked.message)
        elif task == "pooling":
            self._pool(live, model, asked)
        else:
            self._infer(live, model, asked)

    def take(self, live: LiveRequest, part: SequenceDelta) -> SequenceDelta | None:
        """The end of a request's part; the last delta of the whole once there is no part left."""
        gathering = live.gathering
        if gathering is None:
            return None
        whole = gathering.take(part)
        if gathering.error is not None and not live.is_cancelled:
            live.is_cancelled = True
            self.cancel(live, gathering.error)
        return whole

    def cancel(self, live: LiveRequest, error: NaruError | None) -> None:
        """Ends what an engine has of a request."""
        assert live.model is not None
        for engine_id in tuple(live.gathering.left) if live.gathering else (live.engine_id,):
            self._loop.cancel(live.model.engine, engine_id, error)

    def pieces(self, live: LiveRequest, delta: SequenceDelta) -> Sequence[SequenceDelta]:
        """A delta with its vectors as they were asked for, in pieces that fit into messages; all others as they are."""
        output = delta.output
        if output is None:
            return (delta,)
        try:
            return self._vector_pieces(live, delta, output) if output.vectors else (self._within(delta, output),)
        except NaruError as error:
            return (SequenceDelta(delta.request_id, error=error, is_last=True),)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _tokenize(self, live: LiveRequest, model: LoadedModel, message: worker_pb2.GenerateRequest) -> None:
        if model.tokenizer is None:
            raise InvalidRequest(f"model {model.name!r} takes tensors and has no tokenizer", param="model")
        work = functools.partial(tokenize, model, message.tokenize)
        inline = num_text_chars(message) <= INLINE_CHARS
        then = functools.partial(self._tell_tokens, live)
        self._aside.run(live, work, then, "the text could not be tokenized", inline=inline)

    def _tell_tokens(self, live: LiveRequest, tokens: Tokens) -> None:
        delta = SequenceDelta(
            live.engine_id,
            finish_reason=FinishReason.STOP,
            usage=UsageCounts(0, 0, 0),  # nothing was computed
            is_last=True,
            output=TaskOutput(tokens=tokens),
        )
        self._keeper.finish(live, delta)

    # --- vectors and scores -------------------------------------------------------------------------------------------

    def _pool(self, live: LiveRequest, model: LoadedModel, asked: Asked) -> None:
        task = asked.message.pooling
        is_score = task.kind == worker_pb2.POOLING_KIND_SCORE
        check_can(model, SCORE if is_score else EMBED)
        facts = model.pooling
        assert facts is not None, "its tasks say that it pools"
        live.vector_form = _form(facts, task)
        self._aside.run(
            live,
            functools.partial(read_inputs, model, facts, task),
            functools.partial(self._submit_inputs, live, model, asked),
            "the inputs could not be tokenized",
            inline=num_text_chars(asked.message) <= INLINE_CHARS,
        )

    def _submit_inputs(
        self, live: LiveRequest, model: LoadedModel, asked: Asked, inputs: tuple[EncoderInput, ...]
    ) -> None:
        sizes = [len(each.token_ids) for each in inputs]
        arrivals = part_numbers(asked.turn, sizes)
        engine = model.engine
        if isinstance(engine, BatchEngine):
            parts = tuple(BatchInput(each, size) for each, size in zip(inputs, sizes, strict=True))
            request = BatchRequest(live.engine_id, parts, arrivals, asked.message.priority)
            self._post(live, model, engine, request)
            return
        live.gathering = Gathering(live.engine_id, len(inputs))
        self._keeper.is_submitted(live)
        for index, (each, arrival) in enumerate(zip(inputs, arrivals, strict=True)):
            model.note_posted(len(each.token_ids))
            self._loop.submit(engine, _hidden_request(live, asked, index, each, arrival), live.arrived_s)

    # --- tensors ------------------------------------------------------------------------------------------------------

    def _infer(self, live: LiveRequest, model: LoadedModel, asked: Asked) -> None:
        check_can(model, TENSORS)
        task, info, engine = asked.message.tensors, model.facts.info, model.engine
        assert isinstance(engine, BatchEngine), "its tasks say that it takes tensors"
        self._aside.run(
            live,
            functools.partial(read_tensors, task, info.inputs, info.outputs, info.max_batch_size),
            lambda each: self._post(
                live,
                model,
                engine,
                BatchRequest(
                    live.engine_id, (each,), (asked.turn.number,), asked.message.priority, tuple(task.outputs)
                ),
            ),
            "the tensors could not be read",
            inline=asked.message.ByteSize() <= _INLINE_BYTES,
        )

    def _post(self, live: LiveRequest, model: LoadedModel, engine: BatchEngine, request: BatchRequest) -> None:
        self._keeper.is_submitted(live)
        model.note_posted(request.size)
        self._loop.post(lambda outbox: engine.submit_batch(request, live.arrived_s, outbox))

    # --- answers ------------------------------------------------------------------------------------------------------

    def _vector_pieces(self, live: LiveRequest, delta: SequenceDelta, output: TaskOutput) -> list[SequenceDelta]:
        form = live.vector_form or VectorForm()
        rows = form.apply(np.stack([vector.values for vector in output.vectors]))
        vectors = [
            Vector(vector.index, row, vector.prompt_tokens) for vector, row in zip(output.vectors, rows, strict=True)
        ]
        most = max(1, self._max_message_bytes // _VECTOR_SHARE // max(1, rows[0].nbytes + VECTOR_BYTES))
        cuts = [tuple(vectors[start : start + most]) for start in range(0, len(vectors), most)]
        early = [SequenceDelta(delta.request_id, output=TaskOutput(vectors=part)) for part in cuts[:-1]]
        return [*early, dataclasses.replace(delta, output=TaskOutput(vectors=cuts[-1]))]

    def _within(self, delta: SequenceDelta, output: TaskOutput) -> SequenceDelta:
        for each in output.arrays:
            datatype_of(each)
        num_bytes, most = output.num_bytes, self._max_message_bytes // 2
        if num_bytes > most:
            what = "outputs" if output.arrays else "text"
            raise InvalidRequest(
                f"the answer has about {num_bytes} bytes, above {most}; ask for less at once", param=what
            )
        return delta


def _form(facts: PoolingFacts, task: worker_pb2.PoolingTask) -> VectorForm:
    if task.dimensions > facts.dimension:
        raise InvalidRequest(
            f"dimensions is {task.dimensions}; this model's vectors have {facts.dimension}", param="dimensions"
        )
    given = task.normalize if task.HasField("normalize") else None
    if task.kind == worker_pb2.POOLING_KIND_SCORE:
        return VectorForm(sigmoid=facts.is_sigmoid and given is not False)
    return VectorForm(task.dimensions, facts.normalize if given is None else given)


def _hidden_request(live: LiveRequest, asked: Asked, index: int, each: EncoderInput, arrival: int) -> Request:
    message = asked.message
    return Request(
        request_id=part_id(live.engine_id, index),
        prompt_token_ids=each.token_ids,
        params=SamplingParams(max_tokens=0),
        seed=0,
        arrival=arrival,
        priority=message.priority,
        cache_salt=message.cache_salt,
        skip_prefix_cache=message.skip_prefix_cache,
        wants_hidden=True,
    )
