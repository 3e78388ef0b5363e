"""Options that leave open what is drafted."""

import pytest

from lychee.check.cli import parser
from lychee.options import speculative_config
from lychee.runtime.config import SpeculativeConfig


@pytest.mark.parametrize(
    ("given", "tree"),
    [
        ([], "chain"),
        (["--max-draft-len", "8"], "chain"),
        (["--tree", "auto"], "auto"),
        (["--node-budget", "8"], "auto"),
        (["--speculative-config", '{"tree": "auto"}'], "auto"),
        (["--speculative-config", '{"verify": "rejection"}'], "chain"),
        (["--num-speculative-tokens", "3"], "chain"),
        (["--tree", "2,1"], "2,1"),
    ],
)
def test_a_command_may_have_a_default_of_its_own_for_what_no_option_says(given, tree):
    args = parser().parse_args(given)
    assert speculative_config(args, tree="chain").tree == tree


def test_without_one_it_is_planned():
    assert speculative_config(parser().parse_args([])) == SpeculativeConfig(tree="auto")
