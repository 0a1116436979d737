"""[mtp]: multi-token prediction."""

from dataclasses import dataclass
from typing import ClassVar

from redline.config.flags import SET, Section, flag
from redline.config.waits import MTP, RETIRED

DEPTHS = {"mtp_num_layers": SET}


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(Section):
    """Extra layers that predict tokens further ahead."""

    title: ClassVar[str] = "Multi-token prediction"
    account: ClassVar[str] = "kernels"

    mtp_num_layers: int = flag(
        0, at_least=0, waits_for=MTP, help="Depths, each one token further ahead; 0 is off."
    )
    mtp_loss_scaling_factor: float = flag(
        0.1,
        at_least=0,
        other=0.3,
        needs=DEPTHS,
        waits_for=MTP,
        help="Weight of the mean over the depths' losses.",
    )
    mtp_use_repeated_layer: bool = flag(
        False, needs=DEPTHS, waits_for=MTP, help="One layer applied at every depth."
    )
    mtp_detach_heads: bool = flag(
        False, needs=DEPTHS, waits_for=MTP, help="Keep the extra losses out of the trunk."
    )
    mtp_hsm: bool = flag(
        False, needs=DEPTHS, waits_for=MTP, help="Mix hidden states of the depths; needs 2 or more."
    )
    mtp_hybrid_override_pattern: str | None = flag(
        None, waits_for=RETIRED, help="Layer pattern of the depths."
    )
