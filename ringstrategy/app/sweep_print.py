"""Tables of jobs on the screen: where it is narrow some columns are left out, and no column is squeezed."""

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from ringstrategy.app.report import Summary
from ringstrategy.app.sweep_table import Grid, grids, shared_folder

FOLDED = "overrides"  # the column whose cells may take several lines
FOLDED_WIDTH = 22  # what it gets before other columns are left out
CAPTION_WIDTH = 100  # at most


def print_tables(rows: Sequence[Summary], folder: Path) -> None:
    """All jobs, then the means over seeds. In a pipe a job is one line with all columns, however long."""
    console = Console()
    room = console.width if console.is_terminal or "COLUMNS" in os.environ else None
    for grid in grids(rows):
        console.print(Text(f"\n{grid.title} in {folder / shared_folder(rows)}"), soft_wrap=True)
        table, width, left_out = _laid_out(grid, room)
        Console(width=width).print(table)
        note = f" Left out here: {', '.join(left_out)}; a wider terminal and report.html show them." if left_out else ""
        caption = textwrap.fill(grid.caption + note, min(room or CAPTION_WIDTH, CAPTION_WIDTH))
        console.print(Text(caption), soft_wrap=True)


def _laid_out(grid: Grid, room: int | None) -> tuple[Table, int, list[str]]:
    """The table, its width, and the headings of the columns that are not in it."""
    headings = [" ".join(column.heading.split()) for column in grid.columns]
    cells = [[row[place].text for row in grid.rows] for place in range(len(headings))]
    widths = [_width(column.heading, *texts) for column, texts in zip(grid.columns, cells, strict=True)]
    folded = headings.index(FOLDED)
    natural, widths[folded] = widths[folded], min(widths[folded], FOLDED_WIDTH)
    shown = list(range(len(headings)))

    def taken() -> int:
        return sum(widths[place] + 1 for place in shown) - 1

    if room is None:
        room = taken() - widths[folded] + natural
    for place in sorted(shown, key=lambda place: -grid.columns[place].spare):
        if taken() > room and grid.columns[place].spare:
            shown.remove(place)
    if taken() > room:
        widths[folded] = min(widths[folded], max(map(len, " ".join([FOLDED, *cells[folded]]).split())))
    if taken() > room and headings[0] == "job":
        widths[0] = max([len("job"), *(len(part) + 1 for name in cells[0] for part in name.split("/"))])
        lines = [textwrap.wrap(name.replace("/", "/ "), widths[0]) for name in cells[0]]
        cells[0] = ["\n".join(each).replace("/ ", "/") for each in lines]
    widths[folded] = min(natural, max(len(FOLDED), room - taken() + widths[folded]))
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for place in shown:
        column = grid.columns[place]
        justify: JustifyMethod = "right" if column.is_number else "left"
        table.add_column(column.heading, justify=justify, width=widths[place], overflow="fold")
    for row, failed in enumerate(grid.failed):
        # Text, since in a string the brackets of an override would be taken for markup
        table.add_row(*(Text(cells[place][row]) for place in shown), style="red" if failed else None)
    return table, taken(), [heading for place, heading in enumerate(headings) if place not in shown]


def _width(*texts: str) -> int:
    return max(cell_len(line) for text in texts for line in text.split("\n"))
