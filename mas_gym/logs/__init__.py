"""Logs of multi-agent systems as transcripts.

`read_transcripts` reads files of chats, traces and labeled runs, and yields `Transcript` records. Lines that cannot be
read as transcripts are reported individually, and all other lines are read.
"""

from mas_gym.logs.reader import FORMATS, read_transcripts, recognize
from mas_gym.logs.transcript import BrokenLine, LoggedMessage, Transcript
from mas_gym.systems.tool_calls import ToolCall

__all__ = ["FORMATS", "BrokenLine", "LoggedMessage", "ToolCall", "Transcript", "read_transcripts", "recognize"]
