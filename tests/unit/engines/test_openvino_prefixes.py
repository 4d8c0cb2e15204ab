"""Which sequences run together: worked by hand."""

from pipelines.engines.openvino.scoring import Continuation, PrefixGroup, PrefixRow, batches, plan, together

SHOTS = tuple(range(100, 140))  # 40 tokens that many prompts begin with


def test_four_answers_to_one_question_are_one_row() -> None:
    """One-token answers are only predicted, never run, so the four sequences are the same."""
    (group,) = plan([([1, 2, 3], [answer]) for answer in (7, 8, 9, 10)])
    (row,) = group.rows
    assert row.tokens == (1, 2, 3)
    assert row.continuations == [Continuation(pair, 2, (answer,)) for pair, answer in enumerate((7, 8, 9, 10))]


def test_a_sequence_inside_another_is_not_run_again() -> None:
    """(1 2 | 3) runs 1 2; (1 2 | 3 4 5) runs 1 2 3 4, where the first is answered too."""
    (group,) = plan([([1, 2], [3]), ([1, 2], [3, 4, 5])])
    (row,) = group.rows
    assert row.tokens == (1, 2, 3, 4)
    assert {continuation.pair for continuation in row.continuations} == {0, 1}
    assert group.shared == 0  # with no other row


def test_prompts_with_common_shots_share_them() -> None:
    """Three questions after the same 40 tokens: these are computed once."""
    (group,) = plan([([*SHOTS, 1, 2], [9]), ([*SHOTS, 3, 4], [9]), ([*SHOTS, 5], [9])])
    assert (group.shared, len(group.rows)) == (40, 3)


def test_unrelated_prompts_stay_apart() -> None:
    groups = plan([([*SHOTS, 1], [9]), ([*range(200, 240), 1], [9])])
    assert [len(group.rows) for group in groups] == [1, 1]


def test_few_shared_tokens_are_not_worth_an_inference() -> None:
    """15 common tokens are below the 16 that pay for splitting."""
    groups = plan([([*SHOTS[:15], 1], [9]), ([*SHOTS[:15], 2], [9])])
    assert len(groups) == 2


def test_a_row_that_would_cost_the_others_more_stays_out() -> None:
    """Three rows share 40; a fourth shares 16. Joining saves 16 and loses 2 x 24 of what the others share."""
    long = [([*SHOTS, i], [9]) for i in (1, 2, 3)]
    groups = plan([*long, ([*SHOTS[:16], 500], [9])])
    assert sorted((group.shared, len(group.rows)) for group in groups) == [(0, 1), (40, 3)]


def test_wanted_positions_are_never_in_the_shared_part() -> None:
    """The first pair wants the logits at position 9, so only 9 tokens could be shared: too few."""
    groups = plan([([*SHOTS[:10]], [*SHOTS[10:], 1, 1]), ([*SHOTS, 2], [9])])
    assert all(group.shared <= row.free for group in groups for row in group.rows)
    assert len(groups) == 2


def test_every_pair_is_asked_once() -> None:
    pairs = [([*SHOTS[: i % 7 + 1], i % 3], [i % 5, i % 2]) for i in range(50)]
    asked = [continuation.pair for group in plan(pairs) for row in group.rows for continuation in row.continuations]
    assert sorted(asked) == list(range(50))


def test_a_context_of_one_token_shares_nothing() -> None:
    (group,) = plan([([5], [7])])
    assert (group.shared, group.rows[0].tokens) == (0, (5,))


def made(*each: tuple[int, list[int]]) -> list[PrefixGroup]:
    """Groups, by the number of tokens that are shared and the lengths of their rows."""
    return [PrefixGroup(shared, [PrefixRow(tuple(range(length))) for length in lengths]) for shared, lengths in each]


def test_prefixes_of_like_length_run_together() -> None:
    """80 is three quarters of 100, 70 is not; two of 100 are as many as 200 tokens hold."""
    groups = made((100, [110, 111]), (70, [80, 81]), (100, [120, 121]), (80, [90, 91]), (0, [5]), (0, [7]))
    found = [[group.shared for group in each] for each in together(groups, 200, 8)]
    assert found == [[0, 0], [70, 80], [100, 100]]
    assert [len(each) for each in together(groups, 2000, 2)] == [2, 2, 2]
    assert [len(each) for each in together(groups, 10, 8)] == [2, 1, 1, 1, 1]  # a longer one runs alone, in pieces


def test_rows_of_all_groups_share_batches_by_the_length_of_their_rests() -> None:
    """Rests of 5, 3 | 4 tokens: two rows of at most 4 are 8 tokens; the longest alone, though it has more than 4."""
    groups = made((100, [105, 103]), (80, [84]))
    found = [[(group, len(row.tokens)) for group, row in batch] for batch in batches(groups, 8, 9)]
    assert found == [[(0, 103), (1, 84)], [(0, 105)]]
    assert [len(batch) for batch in batches(groups, 800, 9)] == [3]
    assert [len(batch) for batch in batches(groups, 800, 2)] == [2, 1]
