"""Seeds of samples."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(run_seed: int, problem_id: str, state_digest: bytes, sample_index: int) -> int:
    """Return the seed of one sample, the same in every process and on every machine.

    Args:
        run_seed: The seed of the run, any integer.
        problem_id: The problem's id.
        state_digest: `MASState.digest` of the state at which the agent acts.
        sample_index: Number of samples drawn at this state earlier in this search.

    Returns:
        An integer in ``[0, 2**63)``. Different prompts get different seeds, because engines use
        nearly the same noise for prompts with the same seed.
    """
    name = problem_id.encode("utf-8", "surrogatepass")
    # The length prefix separates the fields, so they may contain any bytes.
    body = f"{run_seed}|{sample_index}|{len(name)}|".encode() + name + state_digest
    return int.from_bytes(blake2b(body, digest_size=8).digest(), "big") >> 1
