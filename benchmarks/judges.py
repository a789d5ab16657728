"""How long do 64 rows wait for a judge that takes half a second, and what does a call cost that fails?

The judge is a stand-in for an OpenAI-compatible server, on 127.0.0.1; client, retries and rule are the real ones.
Seconds are on the wall, since nearly all of them are spent waiting.

python benchmarks/judges.py --output benchmarks/results/judges_cpu.json
"""

import argparse
import asyncio
import json
import threading
import time
from pathlib import Path

from machine import save

from trl_ext.rewards import Judge, RuleSet

JUDGE_S = 0.5
NUM_ROWS = 64
AIM_S = 3.0
FAILING = "row 7\n"


class Server:
    """A judge that gives everything a 10, half a second after it was asked, and fails on one row."""

    def __init__(self) -> None:
        self.calls = self.now = self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        while head := await reader.readuntil(b"\r\n\r\n"):
            lines = dict(line.split(b":", 1) for line in head.lower().split(b"\r\n") if b":" in line)
            body = json.loads(await reader.readexactly(int(lines[b"content-length"])))
            self.calls += 1
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(JUDGE_S)
            self.now -= 1
            code = b"500 Away" if FAILING in body["messages"][1]["content"] else b"200 OK"
            choice = {
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": '{"reasoning": "", "score": 10}'},
            }
            reply = json.dumps({"choices": [choice], "usage": {"total_tokens": 300}}).encode()
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (code, len(reply), reply))
            await writer.drain()

    def start(self) -> str:
        """Serve in a thread; return the address."""
        loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

        async def main() -> None:
            server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
            port.append(server.sockets[0].getsockname()[1])
            ready.set()
            await server.serve_forever()

        threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True).start()
        ready.wait()
        return f"http://127.0.0.1:{port[0]}/v1"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve until the client hangs up."""
        try:
            await self.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def measured(name: str, texts: list[str], **fields: int) -> dict[str, float | str]:
    """Score the texts once with a judge of these fields."""
    server, metrics = Server(), {}
    rules = RuleSet([Judge("stand-in", base_url=server.start(), **fields)])
    rules(completions=["warm"])
    start = time.perf_counter()
    values = rules(completions=texts, log_metric=metrics.__setitem__)
    return {
        "name": name,
        "seconds": round(time.perf_counter() - start, 2),
        "most_under_way": server.most,
        "rows_without_value": sum(value is None for value in values),
        "calls": metrics["rules/judge/calls"],
        "retries": metrics["rules/judge/retries"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    texts = [f"text {n}" for n in range(NUM_ROWS)]
    one_fails = [f"row {n}" for n in range(NUM_ROWS)]
    results = [
        measured("64 rows", texts),
        measured("8 rows, one call at a time", texts[:8], concurrency=1),
        measured("64 rows, one of which fails in three attempts", one_fails),
        measured("64 rows, three votes each, 64 calls at a time", texts, votes=3, concurrency=64),
    ]
    for result in results:
        print(", ".join(f"{key} {value}" for key, value in result.items()))
    assert results[0]["seconds"] <= AIM_S, f"64 rows took {results[0]['seconds']} s, and the aim is {AIM_S}"
    save(arguments.output, "judges", judge_s=JUDGE_S, rows=NUM_ROWS, aim_s=AIM_S, results=results)


if __name__ == "__main__":
    main()
