"""A workbench checkpoint as a model of lm-evaluation-harness (extra `lm-eval`).

    lm_eval.simple_evaluate(model=WorkbenchLM.of_run("my-run"), tasks=["my_task"])

Texts are encoded as in `core/downstream.py`: context and continuation as one text, after the
end-of-document id, scored from the last boundary of tokens that all continuations of the same
document and context share. Generation is greedy, without a cache of keys and values: for small
models and short answers.

Shapes: B rows of a batch, S sequence length, T scored tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn import functional as F

from workbench.core.data.evaluation_sets import IGNORED
from workbench.core.data.tokenizer import Tokenizer
from workbench.core.device import DeviceName
from workbench.core.downstream import Row, batches, encode_choices, row_of
from workbench.core.load_model import LoadedModel
from workbench.core.losses import linear_nll
from workbench.core.precision import operands
from workbench.core.train import loss_settings
from workbench.errors import UserError
from workbench.evaluate_run import open_run
from workbench.track.server_runs import find_own
from workbench.track.store import Store

BLOCK = 16384  # entries of the vocabulary whose logits exist at a time
GENERATED = 256  # tokens generated at most, where a task does not say


class WorkbenchLM(LM):
    """The model of a checkpoint with its tokenizer."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._model, self._tokenizer = loaded.model, tokenizer
        self._window = loaded.spec.training.seq_len
        self._settings = loss_settings(loaded.spec)
        self._device = loaded.model.head_weight.device
        names_a_token = tokenizer.byte_lengths > 0
        names_a_token[tokenizer.eod_id] = True
        self._holes = torch.from_numpy(np.flatnonzero(~names_a_token)).to(self._device)

    @classmethod
    def of_run(
        cls, run: str, step: int | None = None, device: DeviceName | None = None
    ) -> WorkbenchLM:
        """The newest checkpoint of a run of the store, or that of `step`.

        Raises:
            UserError: there is no such run or checkpoint, or it cannot be used.
        """
        store = Store()
        entry = find_own(store, run, "its checkpoints are not")
        opened = open_run(entry, store, step, device)
        return cls(opened.loaded, opened.tokenizer)

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Of each (context, continuation): its summed log-likelihood in nats, and whether every
        token of it is the most likely one.

        Raises:
            UserError: a continuation is longer than the model's window.
        """
        groups: dict[Any, list[int]] = {}
        for number, request in enumerate(requests):
            known = request.doc_id is not None
            key = (request.task_name, request.doc_id if known else number, request.args[0])
            groups.setdefault(key, []).append(number)
        texts = [
            (requests[numbers[0]].args[0], [requests[n].args[1] for n in numbers])
            for numbers in groups.values()
        ]
        rows: list[Row] = [Row(np.zeros(0, np.int64), np.zeros(0, np.int64))] * len(requests)
        for numbers, (whole, start, _) in zip(
            groups.values(), encode_choices(self._tokenizer, texts), strict=True
        ):
            for number, ids in zip(numbers, whole, strict=True):
                scored = len(ids) - start
                if scored > self._window:
                    message = f"a continuation of {scored} tokens; the window has {self._window}"
                    raise UserError.at("lm-eval", message, requests[number].args[1][:60])
                if scored:
                    rows[number] = row_of(ids, start, self._tokenizer.eod_id, self._window)
        return self._scores(rows)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """The log-likelihood of each whole text in nats, in the harness's own rolling windows."""
        rows: list[Row] = []
        owners: list[int] = []
        ids = self._tokenizer.encode_documents([request.args[0] for request in requests])
        for number, tokens in enumerate(ids):
            windows = get_rolling_token_windows(
                tokens.tolist(), self._tokenizer.eod_id, self._window, context_len=1
            )
            for context, targets in map(make_disjoint_window, windows):
                inputs = np.array([*context, *targets[:-1]], np.int64)
                wanted = np.full(len(inputs), IGNORED, np.int64)
                wanted[len(inputs) - len(targets) :] = targets
                rows.append(Row(inputs, wanted))
                owners.append(number)
        parts: list[list[float]] = [[] for _ in requests]
        for owner, (total, _) in zip(owners, self._scores(rows), strict=True):
            parts[owner].append(total)
        return [math.fsum(part) for part in parts]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The greedy continuation of each context, up to a stop text or the most tokens.

        Raises:
            UserError: sampling is asked for, or more than one beam.
        """
        return [self._generate(*request.args) for request in requests]

    def _generate(self, context: str, asked: dict[str, Any]) -> str:
        sampled = asked.get("do_sample") or (asked.get("temperature") or 0) > 0
        if sampled or (asked.get("num_beams") or 1) != 1:
            message = "only greedy generation is built: no sampling, no beams"
            raise UserError.at(
                "lm-eval: generation_kwargs", message, str(asked), "do_sample: false"
            )
        until = asked.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        most = int(asked.get("max_gen_toks") or GENERATED)
        start = [self._tokenizer.eod_id]
        ids = start + self._tokenizer.encode_documents([context])[0].tolist()
        made: list[int] = []
        text = ""
        while len(made) < most:
            inputs = torch.tensor([(ids + made)[-self._window :]], device=self._device)
            with torch.no_grad():
                best, _ = self._best(self._model(inputs)[:, -1])
            if int(best) == self._tokenizer.eod_id:
                break
            made.append(int(best))
            # As a whole: a letter may take several tokens.
            text = self._tokenizer.decode(made)
            if ends := [text.index(stop) for stop in stops if stop in text]:
                return text[: min(ends)]
        return text

    def _scores(self, rows: Sequence[Row]) -> list[tuple[float, bool]]:
        """Summed log-likelihood of the scored tokens of each row, and whether all are greedy."""
        found = [(0.0, True)] * len(rows)
        scored = [n for n, row in enumerate(rows) if (row.targets != IGNORED).any()]
        with torch.no_grad():
            for number, nll, greedy in self._each([rows[n] for n in scored]):
                found[scored[number]] = (-math.fsum(nll), bool(greedy.all()))
        return found

    def _each(self, rows: Sequence[Row]) -> Iterator[tuple[int, Any, Any]]:
        model = self._model
        for numbers, inputs, targets in batches(rows, self._tokenizer.eod_id):
            hidden = model(torch.from_numpy(inputs).to(self._device)).flatten(0, 1)
            wanted = torch.from_numpy(targets).to(self._device).flatten()
            nll = linear_nll(hidden, model.head_weight, wanted, self._settings, model.precision)
            kept = wanted != IGNORED
            greedy = torch.zeros_like(kept)
            best, _ = self._best(hidden[kept])
            greedy[kept] = best == wanted[kept]
            table, hits = nll.view(targets.shape).cpu().double(), greedy.view(targets.shape).cpu()
            for place, number in enumerate(numbers):
                here = targets[place] != IGNORED
                yield number, table[place].numpy()[here], hits[place].numpy()[here]

    def _best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely ids [T] after hidden states [T, H] and their logits; of equal ones the
        first. Ids that name no token are left out."""
        weight, holes = self._model.head_weight, self._holes
        best = torch.zeros(len(hidden), dtype=torch.int64, device=self._device)
        highest = torch.full((len(hidden),), -math.inf, device=self._device)
        for start in range(0, len(weight), BLOCK):
            block = weight[start : start + BLOCK]
            logits = F.linear(*operands(self._model.precision, hidden, block)).float()
            here = holes[(holes >= start) & (holes < start + len(block))] - start
            logits[:, here] = -math.inf
            values, places = logits.max(1)
            better = values > highest
            best = torch.where(better, places + start, best)
            highest = torch.where(better, values, highest)
        return best, highest
