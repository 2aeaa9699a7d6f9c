"""Entry of the engine's process; `EngineClient` starts it."""

import sys

from headrace.engine.process.child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
