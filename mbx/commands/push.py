"""Upload a trained run to a model hub, with a card.

    mbx push runs/pendulum hf://me/pendulum-tdmpc
    mbx evaluate hf://me/pendulum-tdmpc

Uploads settings, inputs, rows and the best train state, not checkpoints with the replay. Needs
huggingface_hub (`pip install 'mbx-rl[hub]'`) and a token with write access: HF_TOKEN, or
`hf auth login`.
"""

from __future__ import annotations

from mbx.commands.arguments import make_parser
from mbx.training import hub


def main(arguments: list[str]) -> None:
    """Run `mbx push`. Raises ValueError, OSError or ImportError; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("run", help="Directory of the run.")
    parser.add_argument("url", help="Name on the hub, hf://USER/NAME.")
    parser.add_argument("--private", action="store_true", help="A new repository is private.")
    options = parser.parse_args(arguments)
    print(hub.push(options.run, options.url, private=options.private))
