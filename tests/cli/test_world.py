from __future__ import annotations

import pytest

from megatron_rl.runtime.attempts import outer_world

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[003-004],login",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
}


def test_started_alone() -> None:
    assert outer_world({}) is None
    # A batch script, and a shell within an allocation, are no tasks of a step.
    assert outer_world({"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    assert outer_world({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_torchrun() -> None:
    set_by_it = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    world = outer_world({**set_by_it, **STEP})
    assert world is not None
    assert (world.rank, world.size, world.local_size) == (3, 4, 2)
    assert world.variables == set_by_it


def test_srun() -> None:
    world = outer_world(STEP)
    assert world is not None
    assert (world.rank, world.size, world.local_size) == (4, 5, 1)
    assert world.variables["LOCAL_RANK"] == "0"
    assert world.variables["MASTER_ADDR"] == "gpu003"


def test_all_tasks_of_a_step_meet_at_one_place_and_other_steps_elsewhere() -> None:
    first, other = outer_world({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}), outer_world(STEP)
    assert first is not None
    assert other is not None
    assert first.local_size == 2
    meeting = [first.variables[name] for name in ("MASTER_ADDR", "MASTER_PORT")]
    assert meeting == [other.variables[name] for name in ("MASTER_ADDR", "MASTER_PORT")]
    later = outer_world({**STEP, "SLURM_STEP_ID": "1"})
    assert later is not None
    assert later.variables["MASTER_PORT"] != meeting[1]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1,n2", "n1"), ("n[1-2,5]", "n1"), ("r[2,3]n[07-09]", "r2n07"), ("a-b[3]-ib,c", "a-b3-ib"), ("solo", "solo")],
)
def test_the_first_node(nodes: str, first: str) -> None:
    world = outer_world({**STEP, "SLURM_STEP_NODELIST": nodes})
    assert world is not None
    assert world.variables["MASTER_ADDR"] == first


def test_what_the_user_has_set_is_kept() -> None:
    world = outer_world({**STEP, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"})
    assert world is not None
    assert (world.variables["MASTER_ADDR"], world.variables["MASTER_PORT"]) == ("10.0.0.1", "7")
