"""Put configs/, tools/ and scripts/ into the wheel; everything else is in pyproject.toml.

They go to mapsage/.mim, where OpenMIM looks for them. In a checkout they are used where they lie.
"""
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = ('configs/**/*.py', 'configs/**/*.txt', 'tools/*.py', 'scripts/*.sh')
OF_THE_CHECKOUT = ('scripts/run_tests.sh', 'scripts/accept_machine.sh')


class BuildWithConfigs(build_py):
    """Build the package, and copy beside its modules what the wheel ships."""

    def run(self) -> None:
        """Build the files of the wheel."""
        super().run()
        if getattr(self, 'editable_mode', False):
            return
        for pattern in SHIPPED:
            for path in sorted(ROOT.glob(pattern)):
                name = path.relative_to(ROOT).as_posix()
                if name not in OF_THE_CHECKOUT:
                    out = Path(self.build_lib, 'mapsage', '.mim', name)
                    self.mkpath(str(out.parent))
                    self.copy_file(str(path), str(out))


setup(cmdclass={'build_py': BuildWithConfigs})
