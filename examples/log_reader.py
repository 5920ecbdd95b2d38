"""Your own reader of logs: a generator of transcripts, for ``mas-gym import --format``.

Run ``python examples/log_reader.py``, or import with it:
``mas-gym import examples/logs/diary.txt --format examples/log_reader.py:read --store runs.db``.
"""

from pathlib import Path

from mas_gym.logs import LoggedMessage, Transcript, read_transcripts

ANSWERS = {"How many days has a week?": "7", "How many months has a year?": "12"}


def read(path):
    """Yield the transcripts of a file whose lines begin with Q (the question) or A and a name (a message)."""
    for entry in Path(path).read_text(encoding="utf-8").split("\n\n"):
        question, *lines = entry.strip().splitlines()
        messages = []
        for line in lines:
            _, speaker, text = line.split(" ", 2)
            messages.append(LoggedMessage(speaker, text))
        question = question.removeprefix("Q ")
        yield Transcript(question, tuple(messages), reference=ANSWERS[question])


def main() -> None:
    """Read the example."""
    here = Path(__file__).parent
    for transcript in read_transcripts(here / "logs" / "diary.txt", f"{here}/log_reader.py:read"):
        print(f"{transcript.question} {', '.join(transcript.speakers)}: {transcript.messages[-1].text}")


if __name__ == "__main__":
    main()
