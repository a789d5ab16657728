"""How hard the package is to read, in counts that may only fall: lower a ceiling when a change falls below it."""

import ast

from tests import code_shape

MOST_DECISIONS = 10_443  # of the package; 9,700 are wanted
MOST_OF_A_FUNCTION = 15
MOST_NESTED = 0  # comprehensions in comprehensions
MOST_PACKED = 0  # calls that splat a tuple or dict that was packed for them
MOST_BARE_TUPLES = 70  # functions that return a tuple without names
MOST_WITHOUT_ARGS = 0  # functions of four parameters or more whose docstring lists none
MOST_OVERRIDDEN = 4  # methods of our GRPOTrainer that PPOTrainer overrides; it takes part in the step by hooks
MOST_UNTYPED_TRAINERS = 0  # parameters `trainer` of type Any


def test_the_package_has_no_more_decisions_than_before():
    assert sum(code_shape.decisions(tree) for _, tree in code_shape.trees()) <= MOST_DECISIONS


def test_no_function_has_more_decisions_than_the_worst_before():
    functions = code_shape.decisions_by_function()
    assert not {name: count for name, count in functions.items() if count > MOST_OF_A_FUNCTION}


def test_no_more_comprehensions_stand_in_comprehensions():
    found = code_shape.nested_comprehensions()
    assert sum(found.values()) <= MOST_NESTED, found


def test_no_more_calls_unpack_what_was_packed_for_them():
    found = code_shape.packed_calls()
    assert sum(found.values()) <= MOST_PACKED, found


def test_no_more_functions_return_a_bare_tuple():
    found = code_shape.bare_tuples()
    assert sum(found.values()) <= MOST_BARE_TUPLES, found


def test_no_more_functions_leave_their_parameters_without_a_word():
    found = code_shape.without_args()
    assert sum(found.values()) <= MOST_WITHOUT_ARGS, found


def test_ppo_overrides_no_more_methods_of_grpo():
    found = code_shape.overridden("PPOTrainer", "GRPOTrainer")
    assert len(found) <= MOST_OVERRIDDEN and "evaluate" in found, found


def test_every_exported_function_and_dataclass_lists_its_parameters():
    assert not code_shape.exported_without_args()


def test_no_more_functions_take_a_trainer_of_any_type():
    found = code_shape.untyped_trainers()
    assert sum(found.values()) <= MOST_UNTYPED_TRAINERS, found


def test_folders_import_each_other_in_one_direction():
    assert not code_shape.knots_of_folders()


def test_the_counts_see_what_they_count():
    lines = ["def f():", " a = (1, 2, 3)", " b = {}", " g(*a)", " g(**b)", " return [x for y in [z for z in a] if y]"]
    tree = ast.parse("\n".join(lines))
    function = tree.body[0]
    tuples, dicts = code_shape.packed_names(function)
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    assert (tuples, dicts) == ({"a"}, {"b"})
    assert [code_shape.unpacks(call, tuples, dicts) for call in calls] == [True, True]
    assert code_shape.decisions(tree) == 2
    assert code_shape.holds_another(function.body[-1].value)
