"""Published figures: each has a source, and tables show what is known of it."""

import pytest

from eval.papers.published import FIGURES, published, published_table


def test_every_figure_has_a_source_and_says_something():
    for figure in FIGURES:
        assert figure.source
        assert figure.setting
        assert figure.speedup or figure.tokens_per_pass or figure.accelerated


def test_speedups_agree_with_the_tokens_a_second_beside_them():
    for figure in FIGURES:
        if figure.plain and figure.accelerated and figure.speedup:
            assert float(figure.speedup) == pytest.approx(
                figure.accelerated / figure.plain, abs=0.01
            )


def test_figures_are_found_by_experiment_and_an_unknown_one_is_refused():
    first = published("llma")[0]
    assert first["speedup"] == "over 2"
    assert "plain" not in first
    with pytest.raises(ValueError, match="take one of llma"):
        published("hearsay")


def test_a_table_shows_the_columns_that_are_known():
    llma = published_table(published("llma"))
    assert "| LLMA |" in llma
    assert "over 2 ×" in llma
    assert "tokens/s" not in llma
    space = published_table(published("space"))
    assert "| SPACE | LLaMA2-7B, XSum | 1.94 × | 2.23 | cteant/SPACE" in space
