"""Reports in the format of TensorBoard."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path

from mas_gym.errors import need
from search.report.report_data import SettingReport
from search.report.report_figures import figures_of


def write_tensorboard(reports: Sequence[SettingReport], folder: Path) -> None:
    """Write reports for TensorBoard: the figures as images, and a run per row with scalars.

    The scalars are Hit@k, the costs, and Hit@1 over generated tokens (as steps).

    Raises:
        MissingDependencyError: TensorBoard or matplotlib is not installed.
    """
    summary = need("tensorboard.summary", "TensorBoard")
    for number, report in enumerate(reports, 1):
        _write_images(report, folder / f"{number} figures")
        for row in report.comparison.rows:
            writer = summary.Writer(str(folder / f"{number} {row.label}".replace("/", "_")))
            for k, spread in row.hits.items():
                writer.add_scalar(f"hit@{k}", spread.mean, 0)
            for name in ("tokens", "agent_calls", "reward_calls"):
                writer.add_scalar(name, row.cost(name).mean, 0)
            for point in row.curve:
                writer.add_scalar("hit@1 over tokens", point.hit, round(point.tokens))
            writer.close()


def _write_images(report: SettingReport, folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for name, figure in figures_of(report).items():
        out = io.BytesIO()
        figure.savefig(out, format="png")
        width, height = (round(side * figure.dpi) for side in figure.get_size_inches())
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=out.getvalue())
        writer.add_event(
            Event(step=0, wall_time=time.time(), summary=Summary(value=[Summary.Value(tag=name, image=image)]))
        )
    writer.close()
