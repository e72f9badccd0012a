"""Learning-rate schedules at the published numbers and at their ends."""

import pytest

from lightning_modules.schedules import schedule_factor

MERT = {"warmup_steps": 32_000, "total_steps": 400_000}


def test_published_learning_rates() -> None:
    assert 1.5e-3 * schedule_factor(20_000, **MERT) == pytest.approx(9.375e-4)
    assert 1.5e-3 * schedule_factor(100_000, **MERT) == pytest.approx(1.2228e-3, rel=1e-4)
    assert 5e-4 * schedule_factor(20_000, **MERT) == pytest.approx(3.1e-4, rel=0.01)
    assert 5e-4 * schedule_factor(100_000, **MERT) == pytest.approx(4.1e-4, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("linear", 0.55, 0.1), ("cosine", 0.55, 0.1), ("constant", 1, 1)]
)
def test_shape(schedule: str, middle: float, end: float) -> None:
    def factor(step: int) -> float:
        return schedule_factor(step, schedule=schedule, warmup_steps=10, total_steps=110, end_factor=0.1)  # type: ignore[arg-type]

    assert factor(0) == 0.0
    assert factor(5) == 0.5
    assert factor(10) == 1.0
    assert factor(60) == pytest.approx(middle)
    assert factor(110) == factor(999) == pytest.approx(end)
    values = [factor(step) for step in range(10, 111)]
    assert values == sorted(values, reverse=True)


def test_power_and_no_warmup() -> None:
    assert schedule_factor(0, total_steps=10) == 1.0
    assert schedule_factor(5, total_steps=10, power=2.0) == 0.25


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="schedule='step' is unknown; choose from linear, cosine, constant"):
        schedule_factor(0, schedule="step", total_steps=10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="total_steps=10"):
        schedule_factor(0, warmup_steps=10, total_steps=10)
    with pytest.raises(ValueError, match="warmup_steps=-1"):
        schedule_factor(0, warmup_steps=-1, total_steps=10)
