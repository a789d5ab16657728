"""What ZeRO-3 has gathered: DeepSpeed's rules replayed, on passes that one can follow by hand and on real models."""

from dataclasses import replace

import pytest

from trl_ext.memory.formulas.coordinator import Coordinator, Trace
from trl_ext.memory.formulas.gathering import Gathered, gathered
from trl_ext.memory.formulas.points import points_of
from trl_ext.memory.formulas.visiting import Adapters, Visit, Weight, backward_pass, forward_pass, model_of
from trl_ext.memory.job import Job
from trl_ext.memory.models.find import find_shape
from trl_ext.memory.models.shapes import embedding_params, largest_weight, scorer_params

REWARD = Job("reward", zero_stage=3)
GRPO = Job("grpo", zero_stage=3)
LARGE = 10**12
SMALL = find_shape("0.5B")
LLAMA3 = find_shape("8B")


def chain(*sizes, again=False, frozen=False):
    """A pass through modules with one weight each."""
    weights = [Weight(str(place), size, frozen) for place, size in enumerate(sizes)]
    return [Visit(one.name, (one,), enters, True, again) for one in weights for enters in (True, False)]


def held(visits, bucket, live=LARGE, reuse=0):
    return Coordinator(bucket, live, reuse).run(visits, Trace(visits))


def test_without_zero3_nothing_is_gathered():
    assert gathered(LLAMA3, replace(REWARD, zero_stage=2), False, 1) == Gathered()


def test_a_pass_without_a_trace_holds_one_module_at_a_time():
    assert Coordinator(LARGE, LARGE, 0).run(chain(10, 20, 30), None) == [10, 0, 20, 0, 30, 0]


def test_a_bucket_of_nothing_fetches_nothing_ahead():
    assert held(chain(10, 20, 30), bucket=0) == [10, 0, 20, 0, 30, 0]


def test_a_bucket_takes_one_weight_more_than_it_has_room_for():
    # 10 with 20 on its way, however little the bucket is; then 20 with 30.
    assert held(chain(10, 20, 30), bucket=1) == [30, 20, 50, 30, 30, 0]


def test_weights_that_come_together_stand_twice_until_the_last_is_needed():
    # With 10 come 20 and 30 in one buffer of 50, from which both are copied when the second module needs 20.
    assert held(chain(10, 20, 30), bucket=50) == [60, 50, 100, 80, 30, 0]


def test_no_more_is_fetched_ahead_than_may_live():
    # While 10 are there nothing is; each module fetches its own.
    assert held(chain(10, 20, 30), bucket=50, live=10) == [10, 0, 20, 0, 30, 0]


def test_a_weight_that_is_soon_used_again_stays():
    visits = chain(10, 20)
    first, second = visits[:2], visits[2:]
    assert held([*first, *second, *first], bucket=0, reuse=100) == [10, 10, 30, 10, 10, 0]
    assert held([*first, *second, *first], bucket=0, reuse=0) == [10, 0, 20, 0, 10, 0]


def test_autograd_keeps_the_trained_weights_of_a_repeated_forward():
    backward = Visit("layer", (), True, False)
    trained, frozen = (chain(10, 20, again=True, frozen=frozen) for frozen in (False, True))
    assert Coordinator(0, 0, 0, pins=True).run([backward, *trained], None) == [0, 10, 10, 30, 30]
    assert Coordinator(0, 0, 0, pins=False).run([backward, *trained], None) == [0, 10, 0, 20, 0]
    # Frozen ones stay until the module whose backward repeats them has ended.
    end = Visit("layer", (), False, False)
    assert Coordinator(0, 0, 0, pins=True).run([backward, *frozen, end], None) == [0, 10, 10, 30, 30, 0]


def test_a_module_that_the_trace_does_not_know_ends_fetching_ahead():
    known, other = chain(10, 20, 30), chain(40)
    other = [visit._replace(module="other") for visit in other]
    found = Coordinator(50, LARGE, 0).run([*known[:2], *other], Trace(known))
    assert found == [60, 50, 40, 0]


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_pass_comes_back_to_the_modules_that_it_has_entered(has_head, method):
    job = Job("grpo", method=method, zero_stage=3)
    model = model_of(SMALL, Adapters.of(job), has_head, 3)
    visits = list(forward_pass(model))
    assert sorted(one.module for one in visits if one.enters) == sorted(one.module for one in visits if not one.enters)


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_layer_goes_backward_once_from_the_top(reentrant):
    model = model_of(SMALL, Adapters(), True, 3)
    visits = backward_pass(model, 1, reentrant)
    assert [one.module for one in visits if one.enters and not one.forward and one.module.isdigit()] == ["2", "1", "0"]


def test_a_layer_without_a_checkpoint_does_not_go_forward_again():
    model = model_of(SMALL, Adapters(), True, 4)
    again = {one.module.split(".")[0] for one in backward_pass(model, 2, False) if one.again}
    assert again == {"0", "2"}


def test_weights_and_their_coming_buffers_are_at_most_the_model_twice():
    job = replace(REWARD, stage3_max_live_parameters=10**9, stage3_prefetch_bucket_size=10**9)
    found = gathered(SMALL, job, False, 1)
    # Autograd's copies of a repeated forward stand beside them.
    assert max(*found.top, *found.bottom) <= 3 * 2 * scorer_params(SMALL)
    assert max(ahead.attention for ahead in found.forward) <= 2 * 2 * scorer_params(SMALL)


def test_a_layer_has_its_largest_weight_when_it_goes_backward():
    found = gathered(LLAMA3, REWARD, False, 1)
    between = [max(counts) for _, counts in found.middle]
    assert min(max(found.top), *between, max(found.bottom)) >= 2 * largest_weight(LLAMA3)


def test_the_fused_heads_weight_stays_through_all_of_backward():
    found = gathered(LLAMA3, GRPO, True, 1)
    head = 2 * embedding_params(LLAMA3)
    assert min(found.head, found.head_backward, max(found.top), max(found.bottom), found.embedding) >= head


def test_a_tied_head_is_gathered_with_the_table():
    found = gathered(SMALL, GRPO, True, 1)
    assert found.embedding == 2 * embedding_params(SMALL)
    untied = replace(SMALL, name="untied", tied=False)
    assert gathered(untied, GRPO, True, 1).embedding == 2 * 2 * embedding_params(SMALL)


def test_the_table_comes_with_the_bottom_layer_where_there_is_room():
    jobs = (replace(REWARD, stage3_max_live_parameters=num) for num in (10**9, 10**6))
    roomy, tight = (gathered(LLAMA3, job, False, 1) for job in jobs)
    place = next(place for place, point in enumerate(points_of(LLAMA3, REWARD)) if point.module == "down_proj.W")
    assert tight.bottom[place] < 2 * embedding_params(LLAMA3) <= roomy.bottom[place]


@pytest.mark.parametrize("name", ["0.5B", "8B"])
def test_few_layers_tell_what_many_do(name):
    shape = find_shape(name)
    deep = replace(shape, name="deep", num_layers=shape.num_layers + 10)
    one, other = gathered(shape, REWARD, False, 1), gathered(deep, REWARD, False, 1)
    assert (one.top, one.bottom, one.embedding) == (other.top, other.bottom, other.embedding)


def test_scoring_between_single_passes_ends_fetching_ahead():
    job = Job("ppo", method="lora", critic="head", zero_stage=3)
    once, often = (gathered(SMALL, job, True, num_passes) for num_passes in (1, 4))
    assert max(often.top) > max(once.top)
    assert gathered(SMALL, replace(job, trainer="grpo", beta=0.0), True, 1) == often


def test_every_point_of_a_layer_has_a_number():
    for trainer, method in (("reward", "full"), ("reward", "lora"), ("grpo", "lora")):
        job = Job(trainer, method=method, zero_stage=3)
        assert len(gathered(LLAMA3, job, False, 1).top) == len(points_of(LLAMA3, job))


def test_what_is_fetched_ahead_for_a_backward_stays_after_scoring():
    job = Job("ppo", critic="separate", zero_stage=3)
    assert gathered(LLAMA3, job, False, num_passes=2).left > 0
    assert gathered(LLAMA3, job, False, num_passes=1).left == 0


def test_layers_between_are_told_from_the_top_each_with_more_than_those_above():
    found = gathered(LLAMA3, REWARD, False, 1)
    places = [place for place, _ in found.middle]
    assert places == sorted(places, reverse=True)
    assert all(0 < place < LLAMA3.num_layers - 1 for place in places)


def test_a_reduction_copies_what_is_in_its_bucket():
    # Layers of the 0.5B model are smaller than the bucket: several gradients go out at once.
    large, small = (gathered(SMALL, replace(REWARD, reduce_bucket_size=num), False, 1) for num in (10**7, 10**6))
    assert max(max(counts) for _, counts in large.middle) > max(max(counts) for _, counts in small.middle)
