"""What is reported of a token: its logprob and rank, and those of others at its place.

The device reports the 20 likeliest tokens of every row. For what lies beyond, the row's logits are copied to the host:
a logprob is another one and the difference of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flint_plugins.ops import MAX_LOGPROBS
from flint_runtime.executors.base import StepResult
from flint_runtime.executors.step import Float32
from flint_runtime.request import TokenOutput
from flint_runtime.sampling_params import SamplingParams


def needs_logits(params: SamplingParams, *, constrained: bool) -> bool:
    """Whether logprobs of an answer may concern tokens below the 20 likeliest; after `with_defaults`.

    Args:
        constrained: a grammar, a bias or a penalty may have another token drawn than the likeliest.
    """
    if params.logprob_token_ids is not None:
        return True
    only_likeliest = params.temperature == 0 or 0 < (params.top_k or 0) <= MAX_LOGPROBS
    return params.wants_logprobs and (constrained or not only_likeliest)


def token_output(
    token: int, row: int, result: StepResult, *, most: int, given: Sequence[int] = (), logits: Float32 | None = None
) -> TokenOutput:
    """A token with others at its row.

    Args:
        most: how many of the likeliest.
        given: tokens to report instead of the likeliest; only with logits.
        logits: [V], of the row.
    """
    logprob, best = float(result.logprobs[row]), result.top_tokens[row].tolist()
    best_logprobs = result.top_logprobs[row].tolist()
    if token in best:
        rank = best.index(token) + 1
    elif logits is not None:
        rank = _rank(logits, token)
    else:  # Top-k keeps what is as likely as the last one kept: such tokens share its rank.
        rank = best_logprobs.index(logprob) + 1 if logprob in best_logprobs else None
    if not given:
        return TokenOutput(token, logprob, tuple(best[:most]), tuple(best_logprobs[:most]), rank)
    assert logits is not None
    others = [logprob + float(logits[other]) - float(logits[token]) for other in given]
    ranks = tuple(best.index(other) + 1 if other in best else None for other in given)
    return TokenOutput(token, logprob, tuple(given), tuple(others), rank, ranks)


def _rank(logits: Float32, token: int) -> int:
    """1 and the number of tokens that are likelier, or as likely and of a lower id, as the device orders them."""
    value = logits[token]
    return 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token] == value))
