#pragma once

template <class T>
inline T opaque(T value) {
    return value;
}
