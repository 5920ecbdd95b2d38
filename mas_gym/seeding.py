"""Seeds that depend on what is sampled, not on when: the root of "same seed, same result"."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(run_seed: int, problem_id: str, state_digest: bytes, sample_index: int) -> int:
    """Return the seed of one sample, equal in every process and on every machine.

    Args:
        run_seed: The seed of the run, any integer.
        problem_id: The problem's id.
        state_digest: `MASState.digest` of the state at which the acting agent speaks.
        sample_index: How many samples were drawn at this state before, in this search.

    Returns:
        An integer in ``[0, 2**63)``. Different prompts never share a seed in practice: engines
        that get one seed for several prompts give them nearly the same noise.
    """
    name = problem_id.encode("utf-8", "surrogatepass")
    # The length in front keeps the fields apart whatever bytes they hold.
    body = f"{run_seed}|{sample_index}|{len(name)}|".encode() + name + state_digest
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big") >> 1
