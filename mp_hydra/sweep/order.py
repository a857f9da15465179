"""The order of a sweep's jobs: precisions take turns, so that a machine that slows down or heats up favours none."""

from __future__ import annotations

from collections.abc import Sequence

Job = Sequence[str]


def replicated(jobs: Sequence[Job], replicate: str = "seed") -> bool:
    """Whether the jobs run over more than one value of `replicate`."""
    return len({_value(job, replicate) for job in jobs}) > 1


def interleaved(jobs: Sequence[Job], *, factor: str = "precision", replicate: str = "seed") -> list[Job]:
    """Order jobs by replicate, then by everything else; within that the values of `factor` take turns.

    Each replicate begins with the next value, so that over as many replicates as there are values each stands in each
    place equally often (a cyclic Latin square), and a steady drift cancels.

    Args:
        jobs: overrides, "key=value", of each job.
        factor: the key whose values are to be compared.
        replicate: the key whose values repeat the comparison.

    >>> jobs = [[f"precision={p}", f"seed={s}"] for p in ("a", "b") for s in (0, 1)]
    >>> [" ".join(value[-1] for value in job) for job in interleaved(jobs)]
    ['a 0', 'b 0', 'b 1', 'a 1']
    """
    factors = _in_order(_value(job, factor) for job in jobs)
    replicates = _in_order(_value(job, replicate) for job in jobs)
    others = _in_order(_others(job, factor, replicate) for job in jobs)

    def place(job: Job) -> tuple[int, int, int]:
        turn = replicates[_value(job, replicate)]
        return turn, others[_others(job, factor, replicate)], (factors[_value(job, factor)] - turn) % len(factors)

    return sorted(jobs, key=place)


def _value(job: Job, key: str) -> str:
    """The value that a job gives to a key, whatever sign stands before it; empty if it gives none."""
    for override in job:
        name, _, value = override.partition("=")
        if name.lstrip("+") == key:
            return value
    return ""


def _others(job: Job, *left_out: str) -> tuple[str, ...]:
    return tuple(override for override in job if override.partition("=")[0].lstrip("+") not in left_out)


def _in_order(values: object) -> dict[object, int]:
    return {value: place for place, value in enumerate(dict.fromkeys(values))}  # type: ignore[call-overload]
