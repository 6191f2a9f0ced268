"""Which test holds each row of the specification's catalogues of selectors, and that those tests are there.

N.6 to N.8 list what may be wrong with a selector, its index and its units; K what must not be taken for
another thing. A row is held by a test that breaks it and asks for its refusal; where the code has no place
for it to go wrong, by the test that would fail if it had; or it is of something that does not exist here, and
says so. A test is `file::name` or `file::name[id]`, the file without `test_` and its ending."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1]
ROWS = {"N6": 35, "N7": 40, "N8a": 25, "N8b": 39}
CONCERNED = (1, 2, 4, 8, 11, 12, 14, 16, 18, 20, 21, 22, 23, 30, 33, 36, 37, 38, 39)
"""Rules of K about selection, evidence or rows; the others are of tiers, costs and releases."""

_MUTATIONS = "core_mutations::test_one_wrong_field_has_one_reason_and_publishes_nothing"
_ROWS_OF = "core_candidate::test_an_approximate_answer_is_attention_over_the_selected_rows"
_PIG = "selectors_magic_pig::test_parts_of_other_generations_are_refused"
_SAMPLE = "selectors_magic_pig::test_a_sample_that_is_none_is_refused"
_PQ = "selectors_pqcache::test_parts_that_do_not_belong_together_are_refused"
_SKEW = "selectors_infinigen_index::test_parts_that_do_not_belong_together_are_refused"
_EQUALISED = (
    "selectors_infinigen::test_equal_counts_are_the_floor_of_the_mean_and_the_cap_is_a_share_of_the_context"
)
_REHEARSED = "selectors_infinigen_index::test_queries_that_an_index_cannot_answer_are_refused"
_SQUEEZED = "selectors_squeezed::test_clusters_that_contradict_themselves_cannot_be_made"
_SQUEEZED_GIVEN = "selectors_squeezed::test_parameters_are_refused_by_name"
_CLUSTERS = "selectors_cluster_kv::test_clusters_that_contradict_themselves_cannot_be_made"
_GRAPH = "selectors_retrieval::test_a_graph_that_contradicts_itself_cannot_be_made"
_GRAPHS = "selectors_retrieval::test_an_index_of_mixed_parts_cannot_be_made"
_UNITS = "selectors_inf_llm::test_parts_that_do_not_belong_together_are_refused"
_REPRESENTS = "selectors_inf_llm::test_what_may_not_represent_a_run"
_RECALL = "selectors_inf_llm::test_a_recall_that_is_none_is_refused"
_RULE = "selectors_em_llm_refusals::test_a_rule_that_cuts_nothing_sensible_is_refused"
_CUTS = "selectors_em_llm_refusals::test_candidates_that_the_rule_does_not_give_are_refused"
_NEIGHBOURS = "selectors_em_llm_refusals::test_only_neighbours_within_the_budget_are_events_of_a_recall"
_INDEX = "selectors_contract::test_an_index_that_may_not_answer_says_why"
_ALWAYS = "selectors_contract::test_rows_that_every_query_reads"
_LATE = "core_live_lifecycle::test_steps_are_exact_and_say_why_until_an_index_has_caught_up"
_CUT = "core_evidence_families::test_after_a_truncation_into_what_was_learnt_a_session_is_exact_and_says_why"
_SPARQ = "selectors_sparq::test_it_is_the_published_algorithm"
_SPARQ_PARTS = "selectors_sparq::test_parts_of_other_epochs_are_refused"
_BOXES = "selectors_quest_index::test_boxes_are_the_extremes_of_their_rows_however_these_arrived"
_BOX_PARTS = "selectors_quest_index::test_a_stale_or_foreign_index_is_refused"

HELD = {
    "N6-1": "selectors_sparq::test_parameters_are_refused_by_name[too-many]",
    "N6-2": "selectors_sparq::test_the_worked_example_of_the_specification",  # a window costs no budget
    "N6-3": _SPARQ,
    "N6-4": _SPARQ,
    "N6-5": "selectors_sparq::test_coverage_of_all_channels_is_the_full_score",
    "N6-6": f"{_SPARQ_PARTS}[mean]",
    "N6-7": f"{_SPARQ_PARTS}[keys]",
    "N6-8": "selectors_sparq::test_the_mass_of_what_was_chosen_is_a_share",
    "N6-9": "core_live_families::test_an_engine_answers_as_the_family_says_wherever_the_rows_lie",
    "N6-10": f"{_ALWAYS}[sink-and-recent]",
    "N6-11": "selectors_sparq::test_one_loud_head_chooses_for_its_group",
    "N6-12": "selectors_sparq::test_what_is_read_of_the_index_is_columns_and_not_a_row_each",
    "N6-13": "selectors_retrieval_retro::test_the_published_family_is_never_its_name",
    "N6-14": _BOXES,
    "N6-15": _BOXES,
    "N6-16": "selectors_quest::test_c6_21_the_bound_of_a_page_is_never_below_a_rows_logit",
    "N6-17": f"{_BOX_PARTS}[another selector]",
    "N6-18": "selectors_quest::test_the_selection_is_the_brute_force_one",
    "N6-19": "selectors_quest_index::test_what_cannot_be_kept_is_refused_with_what_could[no rows]",
    "N6-20": "selectors_quest::test_persistent_rows_that_meet_leave_nothing_out",
    "N6-21": "selectors_quest::test_the_published_paths_differ_where_the_last_page_is_not_worth_a_slot",
    "N6-22": "selectors_quest::test_the_certificate_of_boxes_is_sound_and_worth_nothing",
    "N6-23": f"{_SKEW}[orthogonal]",
    "N6-24": f"{_SKEW}[other-d]",
    "N6-25": f"{_SKEW}[out-of-range]",
    "N6-26": f"{_SKEW}[unrotated-queries]",
    "N6-27": f"{_SKEW}[generation]",
    "N6-28": "selectors_infinigen_index::test_parameters_are_refused_by_name",
    "N6-29": "selectors_infinigen::test_more_rows_than_the_cap_end_by_its_policy",
    "N6-30": _EQUALISED,
    "N6-31": _MUTATIONS,
    "N6-33": f"{_INDEX}[rows-that-are-gone]",
    "N6-34": f"{_REHEARSED}[from-the-layer-itself]",
    "N6-35": f"{_INDEX}[ends-too-early]",
    "N7-1": "selectors_pqcache::test_parameters_are_refused_by_name[divides]",
    "N7-2": f"{_PQ}[code-past-the-codebook]",
    "N7-3": f"{_PQ}[width]",
    "N7-4": f"{_PQ}[codes-short]",
    "N7-5": f"{_PQ}[generation]",
    "N7-6": "selectors_pqcache::test_a_code_that_is_not_the_nearest_is_found_by_who_has_the_keys",
    "N7-7": _ROWS_OF,
    "N7-8": "selectors_pqcache::test_keys_without_values_are_no_rows",
    "N7-9": "selectors_pqcache::test_local_and_sink_rows_are_never_chosen_by_score",
    "N7-12": f"{_GRAPH}[entry]",
    "N7-13": f"{_GRAPH}[keys-missing]",
    "N7-14": _LATE,
    "N7-15": "selectors_retrieval::test_c7_08_to_12_a_row_that_is_persistent_and_found_is_read_once",
    "N7-16": f"{_GRAPHS}[queries-unknown]",
    "N7-17": f"{_GRAPH}[edge]",
    "N7-18": "selectors_retrieval::test_an_index_per_kv_head_is_refused",
    "N7-19": f"{_GRAPH}[not-bridged]",
    "N7-20": f"{_GRAPHS}[no-recall]",
    "N7-21": "selectors_retrieval::test_an_index_of_something_else_is_refused[positions]",
    "N7-22": "selectors_squeezed::test_an_index_of_mixed_parts_cannot_be_made[context]",
    "N7-23": "selectors_squeezed::test_a_fixed_context_takes_no_rows_and_no_edit_inside_it",
    "N7-24": f"{_SQUEEZED}[no-counts]",
    "N7-25": f"{_SQUEEZED}[rows-missing]",
    "N7-26": "selectors_squeezed::test_an_index_made_elsewhere_is_held_against_its_rows",
    "N7-27": f"{_SQUEEZED}[label-out-of-range]",
    "N7-28": f"{_SQUEEZED}[fine-without-coarse]",
    "N7-29": f"{_SQUEEZED_GIVEN}[no-data]",
    "N7-30": "selectors_squeezed::test_a_threshold_of_another_scale_is_refused",
    "N7-31": f"{_PIG}[N7-31]",
    "N7-32": f"{_PIG}[N7-32]",
    "N7-33": f"{_PIG}[N7-33]",
    "N7-34": f"{_SAMPLE}[N7-34]",
    "N7-35": f"{_SAMPLE}[N7-35]",
    "N7-36": f"{_SAMPLE}[N7-36]",
    "N7-37": f"{_PIG}[N7-37]",
    "N7-38": f"{_PIG}[N7-38]",
    "N7-39": f"{_SAMPLE}[N7-39]",
    "N7-40": f"{_SAMPLE}[N7-40]",
    "N8a-1": _MUTATIONS,
    "N8a-2": _MUTATIONS,
    "N8a-3": _MUTATIONS,
    "N8a-4": _MUTATIONS,
    "N8a-5": "selectors_em_llm_refusals::test_parts_that_do_not_belong_together_are_refused[N8a-5]",
    "N8a-6": f"{_RECALL}[N8a-6]",
    "N8a-7": "selectors_contract::test_chosen_rows_are_counted_once_and_persistent_ones_not_at_all",
    "N8a-8": _MUTATIONS,
    "N8a-9": f"{_UNITS}[N8a-9]",
    "N8a-10": f"{_UNITS}[N8a-10]",
    "N8a-12": f"{_INDEX}[other-positions]",
    "N8a-13": "selectors_inf_llm::test_moved_rows_are_another_position_epoch",
    "N8a-14": _LATE,
    "N8a-15": "core_evidence_families::test_rows_wait_for_their_surprisals_and_their_steps_are_exact",
    "N8a-16": _LATE,
    "N8a-17": f"{_RECALL}[N8a-17]",
    "N8a-18": "core_live_families::test_an_engine_answers_as_the_family_says_wherever_the_rows_lie",
    "N8a-19": f"{_CLUSTERS}[new-centroids-old-sums]",
    "N8a-20": _MUTATIONS,
    "N8a-21": f"{_CUTS}[N8a-21]",
    "N8a-22": f"{_RULE}[N8a-22]",
    "N8a-25": f"{_RECALL}[N8a-25]",
    "N8b-1": "selectors_inf_llm::test_rows_of_another_geometry_are_refused[N8b-1]",
    "N8b-2": "selectors_inf_llm::test_rows_of_another_geometry_are_refused[N8b-2]",
    "N8b-3": "selectors_inf_llm::test_rows_of_another_geometry_are_refused[N8b-3]",
    "N8b-4": f"{_UNITS}[N8b-4]",
    "N8b-5": f"{_UNITS}[N8b-5]",
    "N8b-6": f"{_UNITS}[N8b-6]",
    "N8b-7": f"{_REPRESENTS}[N8b-7]",
    "N8b-8": f"{_REPRESENTS}[N8b-8]",
    "N8b-9": f"{_REPRESENTS}[N8b-9]",
    "N8b-10": f"{_REPRESENTS}[N8b-10]",
    "N8b-11": f"{_REPRESENTS}[N8b-11]",
    "N8b-12": f"{_RECALL}[N8b-12]",
    "N8b-13": "selectors_inf_llm::test_a_persistent_row_is_in_no_distant_unit[N8b-13-initial]",
    "N8b-14": "selectors_inf_llm::test_a_persistent_row_is_in_no_distant_unit[N8b-14-local]",
    "N8b-15": f"{_ALWAYS}[they-meet]",
    "N8b-16": "selectors_em_llm_refusals::test_without_the_evidence_of_its_rows_there_is_no_index[N8b-16]",
    "N8b-17": f"{_RULE}[N8b-17]",
    "N8b-18": "selectors_em_llm_refusals::test_a_window_of_more_rows_than_there_are_is_refused",
    "N8b-19": f"{_RULE}[N8b-19]",
    "N8b-20": f"{_CUTS}[N8b-20]",
    "N8b-21": f"{_CUTS}[N8b-21]",
    "N8b-22": f"{_CUTS}[N8b-22]",
    "N8b-23": f"{_REPRESENTS}[N8b-9]",  # an event's are those of a run
    "N8b-24": f"{_RULE}[N8b-24]",
    "N8b-25": "selectors_em_llm_refusals::test_refinement_keeps_the_number_and_order_of_cuts[N8b-25]",
    "N8b-26": _NEIGHBOURS,
    "N8b-27": _NEIGHBOURS,
    "N8b-28": "selectors_em_llm::test_the_worked_example_of_the_specification",
    "N8b-29": f"{_CLUSTERS}[sink-row]",
    "N8b-30": f"{_CLUSTERS}[empty]",
    "N8b-31": f"{_CLUSTERS}[not-unit]",
    "N8b-32": f"{_CLUSTERS}[label-missing]",
    "N8b-33": f"{_CLUSTERS}[sizes]",
    "N8b-34": f"{_CLUSTERS}[prefix-sum]",
    "N8b-35": "selectors_cluster_kv::test_c8_13_to_16_the_toy_of_the_specification",
    "N8b-36": "selectors_cluster_kv::test_parameters_are_refused_by_name[trim-order]",
    "N8b-37": "selectors_cluster_kv::test_labels_of_before_an_append_are_refused_beside_what_came_after",
    "N8b-38": f"{_CLUSTERS}[append-without-members]",
    "K1": "core_candidate::test_the_exact_repeat_of_an_approximate_frame_is_exact",
    "K2": "core_live_families::test_exact_steps_between_approximate_ones_are_exact_to_the_bit",
    "K4": "eval_runner::test_only_prompts_that_full_attention_answers_are_conditions",
    "K8": "core_candidate::test_a_refused_frame_leaves_the_index_as_it_was",
    "K11": "core_identity::test_va04_a_move_changes_the_replica_and_not_the_chunk",
    "K12": _MUTATIONS,
    "K14": "selectors_quest::test_the_selection_is_the_brute_force_one",
    "K16": "selectors_inf_llm::test_what_represents_is_small_beside_what_is_read",
    "K18": "selectors_contract::test_no_field_of_an_index_changes_without_its_digest",
    "K20": "selectors_infinigen::test_alpha_bounds_a_rows_weight_and_not_what_rows_weigh_together",
    "K21": "selectors_pqcache::test_the_worked_example_misses_the_best_row_though_every_code_is_nearest",
    "K22": "core_live_families::test_the_mass_that_is_left_out_is_in_the_receipt",
    "K23": "eval_runner::test_a_task_without_an_answer_has_losses_and_no_verdict",
    "K30": "selectors_retrieval_retro::test_the_published_family_is_never_its_name",
    "K33": _CUT,
    "K37": "eval_replay::test_dropped_rows_are_gone_and_the_rest_moved",
    "K38": "selectors_retrieval::test_the_recall_of_a_narrow_walk_is_told_and_so_is_the_shift",
    "K39": "core_mutations_states::test_one_wrong_field_has_one_reason",
}

NOT_HERE = {
    "N6-32": "no family has a pool of rows: a selection is read from the tiers by the step that made it",
    "N7-10": "no family has a pool of rows: a selection is read from the tiers by the step that made it",
    "N7-11": "ids of an index are positions of rows; there is no map between them",
    "N8a-11": "ids of an index are positions of rows; there is no map between them",
    "N8a-23": "documents are no part of this system: no unit comes from anywhere but a session's rows",
    "N8a-24": "no family keeps or drops rows: which of them a query reads is all that it says",
    "N8b-39": "no record compares systems; an evaluation's plan lacks no field, by its type",
    "K36": "no document is retrieved and no distribution of outputs is mixed",
}


def test_every_row_is_held_or_is_of_nothing_here() -> None:
    wanted = {f"{part}-{row}" for part, count in ROWS.items() for row in range(1, count + 1)}
    wanted |= {f"K{row}" for row in CONCERNED}
    assert set(HELD) | set(NOT_HERE) == wanted
    assert not set(HELD) & set(NOT_HERE)


@pytest.mark.parametrize(("row", "test"), HELD.items(), ids=HELD)
def test_the_test_that_holds_a_row_is_there(row: str, test: str) -> None:
    file, _, name = test.partition("::")
    function, _, case = name.partition("[")
    functions, texts = read(file)
    assert function in functions, f"{row}: {file} has no {function}"
    assert not case or case.removesuffix("]") in texts, f"{row}: {file} has no case {case}"


@cache
def read(file: str) -> tuple[frozenset[str], frozenset[str]]:
    """Functions and texts of a test file."""
    [path] = UNIT.rglob(f"test_{file}.py")
    nodes = list(ast.walk(ast.parse(path.read_text())))
    functions = frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return functions, frozenset(value for value in constants if isinstance(value, str))
