"""A loaded model under EleutherAI's evaluation harness (`pip install 'jhpt[lm-eval]'`):

    lm_eval.simple_evaluate(model=harness_model(jhpt.load("runs/mine")), tasks=["hellaswag"])

The harness is imported by `harness_model` alone; what it asks for is answered by `Answers`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from jhpt.core.errors import InputError, NotHere
from jhpt.interop import generate
from jhpt.interop.load import Loaded
from jhpt.interop.rows import BATCH

TOKENS = 256
"""New tokens where a task does not limit them, as the harness' own models have it."""


class Request(Protocol):
    """A question of the harness (`lm_eval.api.instance.Instance`)."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the method that answers it."""


class Answers:
    """The three methods of `lm_eval.api.model.LM`."""

    def __init__(self, loaded: Loaded, batch: int = BATCH) -> None:
        super().__init__()
        self.loaded, self.batch = loaded, batch

    def loglikelihood(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> (log-likelihood of the continuation, whether greedy text would be it)."""
        pairs = [(str(context), str(text)) for context, text in (request.args for request in requests)]
        found = self.loaded.log_likelihoods(pairs, batch=self.batch)
        return [(one.logprob, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> its log-likelihood, of which each token counts once."""
        texts = [str(request.args[0]) for request in requests]
        return [one.logprob for one in self.loaded.log_likelihoods(texts, batch=self.batch)]

    def generate_until(self, requests: Sequence[Request], disable_tqdm: bool = False) -> list[str]:
        """(context, settings of a task) -> the text that follows, up to any text of `until`."""
        answers: dict[int, str] = {}
        groups: dict[generate.Settings, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self._settings(request.args[1]), []).append(index)
        for settings, indices in groups.items():
            contexts = [self._last(str(requests[index].args[0]), settings) for index in indices]
            rows = generate.generate(self.loaded.model, self.loaded.params, self.loaded.tokenizer, contexts, settings)
            answers |= {index: row.text for index, row in zip(indices, rows, strict=True)}
        return [answers[index] for index in range(len(requests))]

    def _settings(self, task: dict[str, Any]) -> generate.Settings:
        """A task's settings, in the words of the harness; those of other searches than sampling are refused."""
        known = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
        if others := sorted(task.keys() - known):
            raise InputError(f"the task sets {', '.join(others)}, and only {', '.join(sorted(known))} are read")
        until = task.get("until") or ()
        settings = generate.Settings(
            tokens=min(int(task.get("max_gen_toks", TOKENS)), self.loaded.model.config.max_length - 1),
            stop=tuple(filter(None, [until] if isinstance(until, str) else until)),
            temperature=0.0,
            batch=self.batch,
        )
        temperature = float(task.get("temperature", 1.0 if task.get("do_sample") else 0.0))
        if not task.get("do_sample", temperature > 0) or not temperature:
            return settings
        return replace(settings, temperature=temperature, top_k=task.get("top_k"), top_p=task.get("top_p"))

    def _last(self, context: str, settings: generate.Settings) -> str:
        """The end of the context that leaves room for the answer."""
        tokenizer, longest = self.loaded.tokenizer, self.loaded.model.config.max_length
        ids, room = tokenizer.encode(context), longest - (settings.tokens or 1)
        kept = min(room, len(ids))
        while len(tokenizer.encode(context)) > room:
            # A cut text may have more tokens than were left of it.
            context, kept = tokenizer.decode(ids[len(ids) - kept :].tolist()), kept - 1
        return context


def harness_model(loaded: Loaded, batch: int = BATCH) -> Any:
    """The model as the harness takes it: an `lm_eval.api.model.LM`.

    Raises:
      NotHere: the harness is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError as error:
        raise NotHere(f"the evaluation harness is not installed ({error}); pip install 'jhpt[lm-eval]'") from None

    class HarnessModel(Answers, LM):  # type: ignore[misc,unused-ignore]
        """`Answers` with what the harness' base class adds: caches, ranks, chat templates."""

    return HarnessModel(loaded, batch)
