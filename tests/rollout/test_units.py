"""Seeds, fingerprints and shards: what can be checked without an engine."""

import torch

from megatron_rl.rollout.sampling import rollout_seed
from megatron_rl.rollout.sync import _fingerprint, _holds


def test_a_seed_belongs_to_one_rollout():
    base = rollout_seed(0, 1, "task/7", 2)
    assert base == rollout_seed(0, 1, "task/7", 2)
    others = [rollout_seed(1, 1, "task/7", 2), rollout_seed(0, 2, "task/7", 2), rollout_seed(0, 1, "task/8", 2)]
    others += [rollout_seed(0, 1, "task/7", 3), rollout_seed(0, -1, "task/7", 2)]
    assert len({base, *others}) == 6
    assert all(0 <= seed < 2**62 for seed in (base, *others))


def test_a_fingerprint_sees_a_change_and_a_move():
    tensor = torch.arange(24.0).view(4, 6)
    changed, moved = tensor.clone(), tensor.clone()
    changed[2, 3] += 1e-3
    moved[0, 0], moved[0, 1] = tensor[0, 1], tensor[0, 0]
    assert len({_fingerprint(tensor), _fingerprint(changed), _fingerprint(moved), _fingerprint(tensor.t())}) == 4
    assert _fingerprint(tensor) == _fingerprint(tensor.clone())


def test_an_engine_shard_is_found_along_either_dimension():
    full = torch.arange(48.0).view(6, 8)
    assert _holds(full, full, 0, 1)
    assert _holds(full[3:], full, 1, 2)
    assert _holds(full[:, 4:], full, 1, 2)
    assert not _holds(full[:3], full, 1, 2)
    padded = torch.zeros(4, 8)
    padded[:2] = full[4:]
    assert _holds(padded, full, 1, 2)  # a vocabulary of 6 rows, padded to 8 over two ranks
    assert not _holds(full + 1, full, 0, 1)
