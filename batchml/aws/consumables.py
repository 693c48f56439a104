"""Consumable resources: what holds the width of an array, which has no such limit of its own.

Source: AWS Batch User Guide, "Resource-aware scheduling".
"""

from typing import Any

from batchml.aws.failures import translated
from batchml.aws.session import Session
from batchml.errors import ServiceError

_EXISTS = "already exists"
_TOO_OLD = "boto3 here is too old for consumable resources: pip install -U 'boto3>=1.37'"


class Consumables:
    """Each method is one call, `hold` sometimes two. All raise what `translated` makes of them."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def hold(self, name: str, quantity: int, tags: dict[str, str]) -> None:
        """Have `quantity` of the resource `name` from now on, of which ended jobs give theirs back.

        What jobs hold already they keep, even above the total.
        """
        client = self._client
        try:
            with translated("CreateConsumableResource"):
                client.create_consumable_resource(
                    consumableResourceName=name,
                    totalQuantity=quantity,
                    resourceType="REPLENISHABLE",
                    tags=tags,
                )
        except ServiceError as error:
            if _EXISTS not in error.message.lower():
                raise
            with translated("UpdateConsumableResource"):
                client.update_consumable_resource(
                    consumableResource=name, operation="SET", quantity=quantity
                )

    def release(self, name: str) -> None:
        """Delete it. Refused while a job that has not ended asks for it."""
        with translated("DeleteConsumableResource"):
            self._client.delete_consumable_resource(consumableResource=name)

    @property
    def _client(self) -> Any:
        client = self._session.client("batch")
        if not hasattr(client, "create_consumable_resource"):
            raise ServiceError("CreateConsumableResource", "SDK", _TOO_OLD, 0)
        return client
