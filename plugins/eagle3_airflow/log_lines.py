"""Whole lines of a job's log from pieces that may cut anywhere. Pure."""

from __future__ import annotations

import base64
import codecs

from eagle3_tasks.contracts.jobs import LogPiece

LONGEST_LINE = 8192


class LogLines:
    """Joins pieces: a character or a line that two pieces share comes out once and whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._partial = ""

    def feed(self, piece: LogPiece, *, log_path: str) -> list[str]:
        """Take a piece and give the lines that are complete now."""
        lines: list[str] = []
        if piece.omitted_bytes:
            lines += self.finish()
            lines.append(
                f"... {piece.omitted_bytes} bytes of the log are left out here; all of it: {log_path}"
            )
        self._partial += self._decoder.decode(base64.b64decode(piece.data))
        *whole, self._partial = self._partial.split("\n")
        lines += [_fold(line) for line in whole]
        while len(self._partial) > LONGEST_LINE:
            lines.append(_fold(self._partial[:LONGEST_LINE]))
            self._partial = self._partial[LONGEST_LINE:]
        return lines

    def finish(self) -> list[str]:
        """Give the last line, which may lack its end."""
        rest = self._partial + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._partial = ""
        return [_fold(rest)] if rest else []


def _fold(line: str) -> str:
    """Of a progress bar that overwrites itself, keep what it showed last."""
    return line.rstrip("\r").rpartition("\r")[2]
