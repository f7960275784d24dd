"""Where members go: small sizes exhaustively, then whatever job."""

import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.roles import RLRoleType
from dlrover.python.rl.config.spec import JobSpec, TrainerSpec, WorkloadSpec
from dlrover.python.rl.control.placement import plan


def job_of(workloads, groups=(), nodes=1, devices=4, device_type="GPU"):
    """``workloads``: role to its number of members, or to the fields of its spec."""
    fields = {role: {"num": spec} if isinstance(spec, int) else spec for role, spec in workloads.items()}
    return JobSpec(
        "job",
        TrainerSpec("m", "T", nodes, device_type, devices),
        {RLRoleType(role): WorkloadSpec("m", "W", **spec) for role, spec in fields.items()},
        tuple({RLRoleType(role): count for role, count in group.items()} for group in groups),
    )


def placed(*args, **options):
    placement, problems = plan(job_of(*args, **options))
    assert not problems, problems
    return placement


def refused(*args, **options):
    placement, (problem,) = plan(job_of(*args, **options))
    assert placement is None
    return str(problem)


def bundles_of(placement, role):
    return [slot.bundle for slot in placement.slots[role]]


def nodes_of(placement, role):
    return [placement.bundles[bundle].node for bundle in bundles_of(placement, role)]


def check(job, placement):
    """Everything that holds for every placement."""
    device = job.trainer.device_type.lower()
    nodes = [bundle.node for bundle in placement.bundles]
    assert nodes == sorted(nodes), "the bundles of a node are side by side"
    assert set(nodes) <= set(range(job.trainer.node_number))
    assert {role: len(slots) for role, slots in placement.slots.items()} == {
        role: spec.num for role, spec in job.workloads.items()
    }
    taken = defaultdict(Counter)
    for slots in placement.slots.values():
        for slot in slots:
            taken[slot.bundle].update(slot.resources)
    used = Counter()
    for index, bundle in enumerate(placement.bundles):
        assert all(taken[index][name] <= amount + 1e-6 for name, amount in bundle.resources.items())
        assert set(taken[index]) == set(bundle.resources), "nothing is asked of a bundle that it does not have"
        used[bundle.node] += bundle.resources[device]
    assert all(amount <= job.trainer.device_per_node + 1e-6 for amount in used.values()), "no node over capacity"
    for role, slots in placement.slots.items():
        ranks = defaultdict(list)
        for slot in slots:
            ranks[placement.bundles[slot.bundle].node].append(slot)
        for node, on_node in ranks.items():
            assert [slot.local_rank for slot in on_node] == list(range(len(on_node)))
            assert {slot.local_world_size for slot in on_node} == {len(on_node)}
            assert len(on_node) <= (job.workloads[role].per_node or len(on_node)), (role, node)
    for group in job.groups:
        shared = [bundles_of(placement, role) for role in group]
        if len({(job.workloads[role].num, count) for role, count in group.items()}) == 1:
            assert all(bundles == shared[0] for bundles in shared), "member i of each role is in the group's bundle i"


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("device_type", ["CPU", "GPU"])
def test_whole_devices_fit_exactly_as_long_as_there_are_enough(nodes, devices, device_type):
    for actors, rollouts in itertools.product(range(1, 8), range(1, 8)):
        job = job_of({"ACTOR": actors, "ROLLOUT": rollouts}, (), nodes, devices, device_type)
        placement, problems = plan(job)
        assert (placement is not None) == (actors + rollouts <= nodes * devices)
        assert (placement is None) == bool(problems)
        if placement is not None:
            check(job, placement)


@pytest.mark.parametrize("roles", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_collocated_roles_share_devices_exactly_as_long_as_there_are_enough(roles, count):
    names = ["ACTOR", "ROLLOUT", "REWARD", "CRITIC"][:roles]
    for nodes, devices, instances in itertools.product([1, 2], [1, 2, 3, 4], [1, 2, 3, 4]):
        group = [dict.fromkeys(names, count)]
        job = job_of(dict.fromkeys(names, count * instances), group, nodes, devices)
        placement, _ = plan(job)
        assert (placement is not None) == (devices // count * nodes >= instances)
        if placement is not None:
            check(job, placement)
            assert len(placement.bundles) == count * instances
            assert all(bundle.resources == {"gpu": 1.0} for bundle in placement.bundles)


def test_three_roles_sharing_take_a_third_each_and_never_more_than_the_device():
    names = ["ACTOR", "ROLLOUT", "REWARD"]
    placement = placed(dict.fromkeys(names, 4), [dict.fromkeys(names, 4)])
    assert {slot.resources["gpu"] for slots in placement.slots.values() for slot in slots} == {0.3333}
    assert all(bundles_of(placement, name) == [0, 1, 2, 3] for name in names)


def test_uneven_counts_of_a_group():
    placement = placed({"ACTOR": 4, "ROLLOUT": 2}, [{"ACTOR": 2, "ROLLOUT": 1}])
    assert (bundles_of(placement, "ACTOR"), bundles_of(placement, "ROLLOUT")) == ([0, 1, 2, 3], [0, 2])
    assert all(bundle.resources == {"gpu": 1.0} for bundle in placement.bundles)


def test_roles_outside_a_group_need_not_fill_a_node():
    placement = placed({"ACTOR": 2, "ROLLOUT": 2, "REWARD": 1}, [{"ACTOR": 2, "ROLLOUT": 2}])
    assert bundles_of(placement, "REWARD") == [2]


def test_an_instance_of_a_group_never_spans_two_nodes():
    placement = placed({"ACTOR": 4, "CRITIC": 4}, [{"ACTOR": 2, "CRITIC": 2}], 2, 3)
    assert nodes_of(placement, "ACTOR") == nodes_of(placement, "CRITIC") == [0, 0, 1, 1]


def test_many_members_over_many_nodes():
    placement = placed({"ACTOR": 8}, (), 12, 2)
    assert nodes_of(placement, "ACTOR") == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [slot.local_rank for slot in placement.slots["ACTOR"]] == [0, 1] * 4


def test_what_is_placed_later_on_an_earlier_node_stands_beside_what_is_there():
    job = job_of({"ACTOR": {"num": 2, "resource": {"gpu": 3}}, "ROLLOUT": 2}, (), 2, 4)
    placement, _ = plan(job)
    check(job, placement)
    assert [bundle.node for bundle in placement.bundles] == [0, 0, 1, 1]
    assert (bundles_of(placement, "ACTOR"), bundles_of(placement, "ROLLOUT")) == ([0, 2], [1, 3])


def test_members_per_node_are_spread():
    placement = placed({"ACTOR": {"num": 3, "per_node": 1}, "ROLLOUT": {"num": 4, "per_node": 2}}, (), 3, 8)
    assert nodes_of(placement, "ACTOR") == [0, 1, 2]
    assert nodes_of(placement, "ROLLOUT") == [0, 0, 1, 1]


def test_members_per_node_hold_for_groups_too():
    roles = {"ACTOR": {"num": 2, "per_node": 1}, "CRITIC": 2}
    assert nodes_of(placed(roles, [{"ACTOR": 1, "CRITIC": 1}], 2, 8), "CRITIC") == [0, 1]


# -- fractions, other resources ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "members", "devices"), [(0.1, 20, 2), (0.3, 6, 2), (0.5, 8, 4), (0.25, 12, 3), (1 / 3, 6, 2)]
)
def test_fractions_fill_devices_exactly(fraction, members, devices):
    roles = {"ACTOR": {"num": members, "resource": {"gpu": fraction}}}
    assert plan(job_of(roles, (), 1, devices))[0] is not None
    roles["ACTOR"]["num"] += 1
    assert plan(job_of(roles, (), 1, devices))[0] is None


def test_a_fraction_of_a_gpu_is_not_put_together_from_two():
    roles = {"ACTOR": {"num": 3, "resource": {"gpu": 0.6}}}
    assert "ACTOR needs 0.6 more on one node, left are [0.8]" in refused(roles, (), 1, 2)
    roles = {"ACTOR": {"num": 3, "resource": {"cpu": 0.6}}}
    assert placed(roles, (), 1, 2, "CPU").total == {"cpu": 1.8}


def test_memory_and_custom_resources_are_reserved_but_are_no_devices():
    roles = {"ACTOR": {"num": 2, "resource": {"memory": 4096, "disk": 100, "cpu": 16}}}
    placement = placed(roles, (), 1, 2)
    assert placement.slots["ACTOR"][0].resources == {"memory": 4096.0, "disk": 100.0, "cpu": 16.0, "gpu": 1.0}
    assert placement.total == {"memory": 8192.0, "disk": 200.0, "cpu": 32.0, "gpu": 2.0}


def test_a_member_may_take_several_devices_or_none():
    roles = {"ACTOR": {"num": 1, "resource": {"gpu": 2}}, "REWARD": {"num": 5, "resource": {"gpu": 0, "cpu": 1}}}
    assert placed(roles, (), 1, 2).total == {"gpu": 2.0, "cpu": 5.0}


# -- refused with the arithmetic --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            ({"ACTOR": 5},),
            "impossible placement: ACTOR x 5 do not fit 1 node(s) x 4 GPU = 4; ACTOR needs 1 more on one node, "
            "left are [0]",
        ),
        (
            ({"ACTOR": {"num": 2, "resource": {"gpu": 3}}, "ROLLOUT": 3}, (), 2, 4),
            "ACTOR x 2, ROLLOUT x 3 do not fit 2 node(s) x 4 GPU = 8; ROLLOUT needs 1 more on one node, "
            "left are [0, 0]",
        ),
        (({"ACTOR": {"num": 1, "resource": {"gpu": 5}}},), "ACTOR needs 5 GPU on one node, which has 4"),
        (({"ACTOR": 6, "CRITIC": 6}, [{"ACTOR": 6, "CRITIC": 6}]), "ACTOR+CRITIC needs 6 GPU on one node, which has 4"),
        (
            ({"ACTOR": {"num": 1, "resource": {"gpu": 1.5}}},),
            "workload.actor.resource.gpu: a member would take 1.5 GPU; more than one must be a whole number",
        ),
        (
            ({"ACTOR": {"num": 3, "per_node": 1}}, (), 2, 8),
            "workload.actor.per_node: 3 members, 1 on each node, need 3 nodes; trainer.node_number is 2",
        ),
        (
            ({"ACTOR": {"num": 4, "per_node": 2}, "CRITIC": 4}, [{"ACTOR": 4, "CRITIC": 4}], 2, 8),
            "workload.actor.per_node: is 2, but its group puts 4 together on one node",
        ),
    ],
)
def test_an_impossible_placement_is_refused_with_the_arithmetic(args, said):
    assert said in refused(*args)


# -- whatever job -----------------------------------------------------------------------------------------------------

RESOURCES = st.fixed_dictionaries(
    {}, optional={"gpu": st.sampled_from([0, 0.1, 0.25, 0.5, 0.7, 1, 2]), "memory": st.integers(0, 100)}
)
SPECS = st.fixed_dictionaries(
    {"num": st.integers(1, 6), "resource": RESOURCES}, optional={"per_node": st.none() | st.integers(1, 4)}
)


@settings(deadline=None, max_examples=200)
@given(
    st.dictionaries(st.sampled_from(["ACTOR", "ROLLOUT", "REWARD", "CRITIC"]), SPECS, min_size=1),
    st.lists(st.dictionaries(st.sampled_from(["ACTOR", "ROLLOUT", "REWARD", "CRITIC"]), st.integers(1, 3)), max_size=2),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from(["CPU", "GPU"]),
)
def test_a_job_is_placed_rightly_or_refused(workloads, groups, nodes, devices, device_type):
    grouped = [role for group in groups for role in group]
    assume(len(grouped) == len(set(grouped)))
    assume(all(group and set(group) <= set(workloads) for group in groups))
    assume(all(workloads[role]["num"] % count == 0 for group in groups for role, count in group.items()))
    job = job_of(workloads, groups, nodes, devices, device_type)
    placement, problems = plan(job)
    assert (placement is None) == bool(problems)
    if placement is not None:
        check(job, placement)
    assert plan(job) == (placement, problems)
