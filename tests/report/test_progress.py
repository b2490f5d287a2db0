from __future__ import annotations

import io

import pytest
from rich.console import Console

from gatelab.report.progress import TrainingProgress, duration


class Clock:
    seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def a_log() -> tuple[TrainingProgress, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    return TrainingProgress(Console(file=output, width=40), line_every_seconds=15.0, clock=clock), clock, output


def a_terminal(width: int = 80) -> tuple[TrainingProgress, Clock, io.StringIO]:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, width=width, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    return TrainingProgress(console, clock=clock), clock, output


def test_a_log_gets_a_line_at_the_first_update_then_now_and_then_and_at_the_end() -> None:
    progress, clock, output = a_log()
    with progress:
        progress.start_run("headwise", 100)
        for step in range(1, 101):
            clock.seconds += 1.0
            progress.update(step, 8.0 - step / 100, 8912.4, 0.4149)
        progress.finish_run("held-out loss 4.5000")
    lines = output.getvalue().splitlines()
    assert lines[0] == "headwise: 100 steps"
    assert lines[1] == ("headwise  step 1/100  loss 7.9900  8,912 tokens/s  41% of peak  0:01 elapsed  1:39 left")
    assert [line.split("  ")[1] for line in lines[2:-1]] == [
        "step 16/100",
        "step 31/100",
        "step 46/100",
        "step 61/100",
        "step 76/100",
        "step 91/100",
        "step 100/100",
    ]
    assert lines[-1] == "headwise  finished after 1:40  held-out loss 4.5000"
    assert "\x1b" not in output.getvalue()


def test_the_time_left_forgets_a_slow_first_step() -> None:
    progress, clock, output = a_log()
    with progress:
        progress.start_run("ungated", 10)
        for step, seconds in ((1, 100.0), (2, 20.0), (3, 20.0)):
            clock.seconds += seconds
            progress.update(step, 5.0)
        progress.finish_run("")
    left = [line.split("  ")[-1] for line in output.getvalue().splitlines()[1:-1]]
    assert left == ["15:00 left", "2:40 left", "2:20 left"]


def test_a_resumed_runs_pace_counts_its_own_steps() -> None:
    progress, clock, output = a_log()
    with progress:
        progress.start_run("ungated", 1000, completed=900)
        clock.seconds += 10.0
        progress.update(910, 5.0)
        progress.finish_run("done")
    lines = output.getvalue().splitlines()
    assert lines[0] == "ungated: 1,000 steps, resumed after step 900"
    assert lines[1] == "ungated  step 910/1,000  loss 5.0000  0:10 elapsed  1:30 left"


def test_unknown_figures_are_left_out_and_a_broken_loss_is_shown() -> None:
    progress, clock, output = a_log()
    with progress:
        progress.start_run("ungated", 5)
        clock.seconds += 2.0
        progress.update(1, float("nan"))
        progress.finish_run("")
    assert output.getvalue().splitlines()[1] == "ungated  step 1/5  loss nan  0:02 elapsed  0:08 left"


def test_an_interrupted_run_says_where_it_stopped() -> None:
    progress, clock, output = a_log()
    with pytest.raises(KeyboardInterrupt), progress:
        progress.start_run("ungated", 500)
        clock.seconds += 61.0
        progress.update(123, 5.0)
        raise KeyboardInterrupt
    assert output.getvalue().splitlines()[-1] == "ungated  stopped after 1:01  at step 123/500"


def test_a_terminal_shows_the_first_loss_at_once_and_keeps_finished_runs() -> None:
    progress, clock, output = a_terminal()
    with progress:
        progress.start_run("ungated", 20)
        clock.seconds += 3.0
        progress.update(1, 7.1234, 8912.0, 0.41)
        first = output.getvalue()
        assert "step 1/20" in first
        assert "loss 7.1234   8,912 tokens/s   41% of peak   0:03 elapsed   0:57 left" in first
        progress.message("checkpoint saved")
        progress.finish_run("loss 6.0000")
        progress.start_run("headwise", 20)
        clock.seconds += 2.0
        progress.update(1, 7.0)
    text = output.getvalue()
    assert "checkpoint saved" in text
    assert "ungated  finished after 0:03  loss 6.0000" in text
    assert text.index("ungated  finished") < text.index("headwise")
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K") or "\x1b[?25h" in text  # the cursor is back


def test_names_can_not_drive_the_terminal() -> None:
    progress, clock, output = a_log()
    with progress:
        progress.start_run("[red]a\x1b[2J\u202e", 5)
        clock.seconds += 1.0
        progress.update(1, 5.0)
        progress.message("[bold]b\x07")
        progress.finish_run("[blink]c\x9b")
    text = output.getvalue()
    assert all(name in text for name in ("[red]a", "[bold]b", "[blink]c"))
    assert not any(sign in text for sign in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
