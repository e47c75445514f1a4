#!/usr/bin/env python3
"""Open the dashboard on the tests' pocket engine: for working on its looks without a model.

usage: fake_stream.py [--blocks 8] [--block-size 4] [--requests 3] [--interval 0.4] [--ascii] [--stale] [--steps N]
"""

import argparse
import random
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "dashboard"))

from dashboard_story import StoryEngine, StorySource

from kvscope.dashboard.app import DashboardApp
from kvscope.transport.recording import Recording, ReplaySource
from kvscope.transport.source import Status

PROMPTS = (
    ("Once upon a time there was a king", 2),
    ("The moon shone on the water", 1),
    ("[/nope] [@click=app.quit]hostile[/] words 漢字 and 🌙 moons", 1),
    ("O Romeo, Romeo, wherefore art thou", 3),
    ("A long prompt that takes many blocks of the pool, and has to wait until there is room for it again", 1),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--block-size", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--steps", type=int, default=6, help="steps made before the first picture")
    parser.add_argument("--interval", type=float, default=0.0, help="seconds per step afterwards; 0 stands still")
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--stale", action="store_true", help="the connection is lost after a second")
    parser.add_argument("--replay", action="store_true", help="as a recording")
    args = parser.parse_args()

    engine = StoryEngine(args.blocks, args.block_size, seed=random.Random(3).randrange(100))
    batches = engine.start()
    for index in range(args.requests):
        prompt, n = PROMPTS[index % len(PROMPTS)]
        batches += engine.submit(prompt, n=n, max_tokens=args.max_tokens + 5 * index)
    batches += engine.run(args.steps)
    if args.replay:
        recording = Recording(Path("story.mcap"), list(enumerate(batches)))
        DashboardApp(ReplaySource(recording), title="story.mcap", ascii_only=args.ascii).run()
        return
    source = StorySource(engine, batches, interval_s=args.interval or None)
    if args.stale:
        timer = threading.Timer(1.0, source.set_status, (Status.STALE, "no heartbeat since 12:04:31"))
        timer.daemon = True
        timer.start()
    DashboardApp(source, title="story", ascii_only=args.ascii).run()


if __name__ == "__main__":
    main()
