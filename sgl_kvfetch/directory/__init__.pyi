from .front import FrontStore as FrontStore
from .local import LocalStore as LocalStore, StoreUsage as StoreUsage, open_store as open_store
