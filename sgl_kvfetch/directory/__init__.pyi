from .files import (
    OpenObject as OpenObject,
    open_object as open_object,
    os_errors as os_errors,
    read_fully as read_fully,
)
from .local import (
    FolderUsage as FolderUsage,
    IncompleteSegmentError as IncompleteSegmentError,
    LocalStore as LocalStore,
    StoreUsage as StoreUsage,
)
