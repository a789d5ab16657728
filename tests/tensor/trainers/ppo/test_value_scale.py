"""The running scale of the critic: the mean and deviation of what it is shown, undone exactly, saved whole."""

import pytest
import torch

from trl_ext.trainers.ppo.critic.scale import ValueScale

torch.set_num_threads(1)


def alone(x):
    return x


def test_the_first_batch_sets_the_scale():
    scale, mask = ValueScale(), torch.tensor([[1.0, 1.0, 0.0]])
    scale.follow(torch.tensor([[2.0, 6.0, float("nan")]]), mask, alone)
    assert (scale.mean, scale.std) == pytest.approx((4.0, 2.0))
    assert scale.values(torch.tensor([-1.0, 0.5])).tolist() == pytest.approx([2.0, 5.0])


def test_it_follows_and_undoes_exactly():
    scale, mask = ValueScale(), torch.ones(1, 2)
    scale.follow(torch.tensor([[0.0, 2.0]]), mask, alone)
    for _ in range(200):
        scale.follow(torch.tensor([[98.0, 102.0]]), mask, alone)
    assert (scale.mean, scale.std) == pytest.approx((100.0, 2.0), rel=1e-3)
    values = torch.tensor([97.0, 103.5])
    torch.testing.assert_close(scale.values(scale.outputs(values)), values)


def test_returns_that_do_not_vary_and_batches_without_tokens_give_no_scale():
    scale = ValueScale()
    scale.follow(torch.ones(1, 2), torch.zeros(1, 2), alone)
    assert (scale.mean, scale.std) == (0.0, 1.0)
    scale.follow(torch.full((1, 2), 0.1), torch.ones(1, 2), alone)
    assert scale.std == 1.0


def test_a_scale_that_is_off_stays_where_it_is_and_a_saved_one_comes_back():
    off, on = ValueScale(is_running=False), ValueScale()
    for scale in (off, on):
        scale.follow(torch.tensor([[1.0, 5.0]]), torch.ones(1, 2), alone)
    values = torch.tensor([3.0])
    assert off.values(values) is values and off.outputs(values) is values
    again = ValueScale()
    again.load_state_dict(on.state_dict())
    assert again == on


def test_a_reward_models_outputs_begin_as_the_line_of_least_squares():
    torch.manual_seed(0)
    mask = (torch.rand(8, 16) < 0.8).float()
    outputs, noise = 30 + 4 * torch.randn(8, 16), torch.randn(8, 16)
    to_come = torch.where(mask.bool(), 2 + 0.5 * outputs + 3 * noise, torch.nan)
    scale = ValueScale()
    scale.centre(outputs, to_come, mask, alone)
    scale.follow(to_come, mask, alone)
    x, y = outputs[mask.bool()].double(), to_come[mask.bool()].double()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    line = y.mean() + slope * (x - x.mean())
    torch.testing.assert_close(scale.values(scale.standardised(outputs))[mask.bool()], line.float())
    again = ValueScale()
    again.load_state_dict(scale.state_dict())
    again.centre(-outputs, to_come, mask, alone)
    assert again == scale


@pytest.mark.parametrize("sign", [-1.0, 0.0])
def test_a_reward_model_that_knows_nothing_begins_near_the_mean(sign):
    outputs = torch.tensor([[1.0, 3.0, 1.0, 3.0]])
    to_come = torch.tensor([[5.0, 7.0, 7.0, 5.0]]) if sign == 0.0 else sign * outputs
    scale, mask = ValueScale(), torch.ones(1, 4)
    scale.centre(outputs, to_come, mask, alone)
    scale.follow(to_come, mask, alone)
    values = scale.values(scale.standardised(outputs))
    assert values.std(correction=0).item() == pytest.approx(0.5)
    assert values.mean().item() == pytest.approx(to_come.mean().item())
