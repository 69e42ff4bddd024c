from .files import (
    OpenObject as OpenObject,
    open_object as open_object,
    os_errors as os_errors,
    read_fully as read_fully,
)
from .local import (
    FolderUsage as FolderUsage,
    LocalStore as LocalStore,
    StoreUsage as StoreUsage,
)
from .open import open_store as open_store
from .writing import IncompleteSegmentError as IncompleteSegmentError
