// Functions that the bindings of CBSR ops share.
#pragma once
#include "stable.h"

namespace pyg_fast {

inline ScalarType type_of_columns(int64_t dim) {
  return dim <= 256 ? ScalarType::Byte : dim <= 65536 ? ScalarType::UInt16 : ScalarType::Int;
}

inline ColumnType column_type(ScalarType type) {
  return type == ScalarType::Byte     ? ColumnType::u8
         : type == ScalarType::UInt16 ? ColumnType::u16
                                      : ColumnType::i32;
}

}  // namespace pyg_fast
