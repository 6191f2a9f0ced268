"""docs/data-plane.md names a test for each public complaint about caches for K/V that has a counterpart here;
here is seen that the page has all of them and that these tests exist."""

from __future__ import annotations

from tests.unit.house.named_tests import REPOSITORY, cases_of, missing_tests

PAGE = REPOSITORY / "docs" / "data-plane.md"
_LISTED = """
vllm#45704 vllm#46278 vllm#47282 vllm#31210 vllm#31341 dynamo#5068 vllm#39702 vllm#42289 LMCache#207
LMCache#4385 LMCache#1858 Mooncake#3030 Mooncake#778 sglang#35769 sglang#31108 sglang#30321 sglang#9397
vllm#46951 vllm#44250 LMCache#2961 vllm#42125 sglang#26792 lmdeploy#4917 sglang#26747 sglang#38577
sglang#37160 LMCache#4825 LMCache#1139 LMCache#2136 LMCache#1739 LMCache#1658 LMCache#4463 LMCache#4467
LMCache#2947 LMCache#4358 vllm#52784 vllm#54779 vllm#54327 vllm#54363 Mooncake#1139 Mooncake#1196
Mooncake#3052 Mooncake#3817 LMCache#2273 LMCache#562 LMCache#563 LMCache#1313 LMCache#2420 dynamo#5012
dynamo#6032 rocm-aic#86 LMCache#2951 sglang#32455 sglang#30760 sglang#26921 sglang#28429 sglang#22607
vllm#49118 vllm#52211 vllm#52170 vllm#46014 vllm#38460 ROCm#40549 LMCache#4715 LMCache#4642 LMCache#4670
LMCache#4676 local-inference-lab/vllm#191 vllm#49250 vllm#45497 aibrix#2231 vllm#54914 vllm#44294
"""
CASES = _LISTED.split()


def test_every_case_is_in_the_table_once_with_a_test_or_the_reason_why_not() -> None:
    assert cases_of(PAGE, CASES) == sorted(CASES)


def test_every_named_test_exists() -> None:
    assert missing_tests(PAGE, at_least=80) == []
