"""Makes the pocket engine importable: with importlib import mode a test folder is not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
