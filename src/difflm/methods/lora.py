"""LoRA (Hu et al., 2022): adapters of somebody else's diffusion model, which itself stays as it is."""

from difflm.methods.base import Method
from difflm.models.open_models import find_open_model


class Lora(Method):
    name = "lora"

    pretrained: str = ""
    "The directory of the model (model.pretrained=DIR)."

    def find_fault(self) -> str:
        if self.pretrained and find_open_model(self.pretrained) is None:
            return f"model.pretrained: {self.pretrained} holds no config.json of an open diffusion model"
        return super().find_fault()
