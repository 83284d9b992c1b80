"""What several test files share. An assert in one of them shows its values when it fails, as in a test."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite(*(f"helpers.{file.stem}" for file in Path(__file__).parent.glob("[a-z]*.py")))
